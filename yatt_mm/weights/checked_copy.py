"""Copying weights and checking them: a value that is nan or infinite must not reach an engine.

All publishers use these checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

CHUNK_BYTES = 256 * 2**10
"""The number of bytes that are copied and then checked: small enough that they are still in the processor's cache for
the check."""


class NonFiniteWeightsError(FloatingPointError):
    """A weight is nan or infinite; the message names the tensor."""

    @classmethod
    def of(cls, name: str) -> NonFiniteWeightsError:
        """Return the error for the tensor with this name."""
        return cls(
            f"{name} has values that are not finite; the engines keep the weights they have: lower train.lr or "
            "train.clip_grad and continue with --resume from the last checkpoint"
        )


def copy_finite(name: str, source: torch.Tensor, place: torch.Tensor) -> None:
    """Copy `source` to `place`, which has equal shape and dtype and is in this host's memory.

    Raises NonFiniteWeightsError as soon as it finds a nan or an infinity; the contents of `place` are then incomplete.
    float8_e4m3fn and integers are not checked.
    """
    if not source.numel():
        return
    if not source.ndim or (source.is_contiguous() and place.is_contiguous()):
        source, place = source.view(-1), place.view(-1)  # one dimension is cheaper to split and to sum than rows
    seen = source if source.device.type == "cpu" else place
    rows = max(1, CHUNK_BYTES * len(source) // (source.numel() * source.itemsize))
    for part, target, copied in _chunks(rows, source, place, seen):
        target.copy_(part)
        check_finite(name, copied)


def check_finite(name: str, values: torch.Tensor) -> None:
    """Raise NonFiniteWeightsError if one of the values is nan or infinite. float8 and integers are not checked.

    A single nan or infinity makes the sum not finite, and a sum is the fastest pass over the values. A sum may also
    overflow, so if it is not finite, the values are checked one by one.
    """
    if values.dtype in _CHECKED_DTYPES and not math.isfinite(values.sum()) and not values.isfinite().all():
        raise NonFiniteWeightsError.of(name)


_CHECKED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes whose values are checked."""


def _chunks(rows: int, *tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    """Return the tensors split into chunks of `rows` rows, one tuple per chunk."""
    if rows >= len(tensors[0]):
        return [tensors]
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
