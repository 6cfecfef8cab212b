"""Copying weights while looking at them: a value that is not finite must not reach an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

CHUNK_BYTES = 256 * 2**10
"""Copied, then looked at: small enough to be still in the core's cache."""


class NonFiniteWeightsError(FloatingPointError):
    """A weight is nan or infinite."""

    @classmethod
    def of(cls, name: str) -> NonFiniteWeightsError:
        """For a tensor of this name."""
        return cls(
            f"{name} has values that are not finite; the engines keep the weights they have: lower train.lr or "
            "train.clip_grad and continue with --resume from the last checkpoint"
        )


def copy_finite(name: str, source: torch.Tensor, place: torch.Tensor) -> None:
    """Copy `source` to `place`, of equal shape and dtype, the latter in this host's memory.

    Raises NonFiniteWeightsError, which names the tensor, as soon as a nan or infinity was seen: what is in `place` is
    then of no use. float8_e4m3fn and integers are not looked at.
    """
    if not source.numel():
        return
    if not source.ndim or (source.is_contiguous() and place.is_contiguous()):
        source, place = source.view(-1), place.view(-1)  # cheaper to cut and to sum than rows
    seen = source if source.device.type == "cpu" else place
    rows = max(1, CHUNK_BYTES * len(source) // (source.numel() * source.itemsize))
    for part, target, copied in _chunks(rows, source, place, seen):
        target.copy_(part)
        check_finite(name, copied)


def check_finite(name: str, values: torch.Tensor) -> None:
    """Raise NonFiniteWeightsError where one of the values is nan or infinite. float8 and integers are not looked at.

    One such value is enough for a sum that is not finite, and a sum is the fastest pass there is. A sum that only
    overflowed proves nothing: the values are then looked at one by one.
    """
    if values.dtype in _LOOKED_AT and not math.isfinite(values.sum()) and not values.isfinite().all():
        raise NonFiniteWeightsError.of(name)


_LOOKED_AT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _chunks(rows: int, *tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    if rows >= len(tensors[0]):
        return [tensors]
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
