"""One training sample as the engine takes it: numpy at the border, pixels only where they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """A prompt with one response. T tokens, K of them sampled."""

    token_ids: np.ndarray
    """[T] int64, prompt with its image tokens expanded, then the response."""
    loss_mask: np.ndarray
    """[T] bool, True on tokens the policy sampled; prompt, image and tool tokens are False."""
    grid_thw: tuple[tuple[int, int, int], ...]
    """(t, h, w) in patches, one per image, in the order of the tokens."""
    patches: tuple[np.ndarray, ...]
    """uint8 [t * h * w, D] per image; empty on ranks that need no pixels. Samples of one group should share the
    same array objects: a microbatch encodes each object once."""
    columns: Mapping[str, np.ndarray]
    """float32 [K] each: what the loss wants per sampled token (advantages, weights, ...)."""
