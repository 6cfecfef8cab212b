"""Orders of prompts for tests: of one training set, or of several that are mixed."""

from __future__ import annotations

from dataplane.datasets.sampler import Source
from yatt_mm.batching.prompt_order import PromptOrder
from yatt_mm.protocol.control import TRAIN


def order_of(num_samples: int, *, seed: int = 0) -> PromptOrder:
    """Return the order of a run with one training set."""
    return PromptOrder([Source(dataset=TRAIN, num_samples=num_samples)], seed=seed)


def mixed_order(weights: dict[str, float], *, num_samples: int = 50, seed: int = 0) -> PromptOrder:
    """Return the order of sets of these weights, which have the same number of samples."""
    sources = [Source(dataset=name, num_samples=num_samples, weight=weight) for name, weight in weights.items()]
    return PromptOrder(sources, seed=seed)
