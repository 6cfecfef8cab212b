"""One training sample in the form that the engine takes: numpy at the border, and pixels only where they are needed."""

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
    """(t, h, w) in patches, one per image or video, in the order of the tokens."""
    seconds_per_grid: tuple[float, ...] = ()
    """The seconds from one t of a video to the next, one per medium (any number for images); () means one for all."""
    patches: tuple[np.ndarray | None, ...]
    """uint8 [t * h * w, D] per image, None for those that other ranks encode (`TrainEngine.own_media`); empty on ranks
    that need no pixels."""
    columns: Mapping[str, np.ndarray]
    """[name] float32 [K]: the values that the loss needs per sampled token (advantages, weights, ...)."""
    media_keys: tuple[str, ...] = ()
    """The name of each image, its digest: a microbatch encodes images with the same name once. Without names, images
    are equal only if they are the same array object."""
