"""The columns that a loss reads of the samples of a microbatch, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.training.train_sample import TrainSample

ALWAYS = ("weights", "advantages", "old_logprobs", "is_current", "rollout_logprobs")
MEASURED = ("reference_logprobs", "old_values", "returns")
"""The columns that are there if something measured them, and then in all samples of a step."""


def loss_inputs(samples: Sequence[TrainSample], device: torch.device) -> LossInputs:
    """Return what a loss reads of the sampled tokens of a microbatch, which has some."""
    tokens = [sample.sampled for sample in samples if sample.sampled is not None]
    names = [*ALWAYS, *(name for name in MEASURED if getattr(tokens[0], name) is not None)]
    columns = {name: np.concatenate([getattr(of_sample, name) for of_sample in tokens]) for name in names}
    columns["sequences"] = np.repeat(np.arange(len(samples)), [int(sample.loss_mask.sum()) for sample in samples])
    on_device = {name: torch.from_numpy(values).to(device) for name, values in columns.items()}
    return LossInputs(**on_device, num_sequences=len(samples))
