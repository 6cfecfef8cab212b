"""Copying weights while looking at them: a value that is not finite must not reach an engine."""

from __future__ import annotations

import numpy as np
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
    if not source.ndim:
        source, place = source.view(1), place.view(1)
    seen = source if source.device.type == "cpu" else place
    rows = max(1, CHUNK_BYTES * len(source) // (source.numel() * source.itemsize))
    limits = _LIMITS.get(source.dtype)
    for begin in range(0, len(source), rows):
        place[begin : begin + rows].copy_(source[begin : begin + rows])
        if limits and not limits.hold(seen[begin : begin + rows]):
            raise NonFiniteWeightsError.of(name)


class _Limits:
    """Tells from the bits: all exponent bits set means nan or infinity.

    As unsigned numbers negative floats are the largest, as signed ones positive floats are: so two maxima, which need
    no memory and which numpy computes fast for every width, find either sign's worst.
    """

    def __init__(self, exponent: int, bits: torch.dtype) -> None:
        self._bits = bits
        self._signed: np.dtype = torch.empty(0, dtype=bits).numpy().dtype
        self._unsigned = np.dtype(f"u{self._signed.itemsize}")
        self._positive = exponent
        self._negative = exponent | 1 << (8 * self._signed.itemsize - 1)

    def hold(self, values: torch.Tensor) -> bool:
        """True where every value is finite."""
        bits = np.from_dlpack(values.view(self._bits))  # `.numpy()` would keep a parameter from being released
        return bool(bits.max() < self._positive and bits.view(self._unsigned).max() < self._negative)


_LIMITS = {
    torch.float64: _Limits(0x7FF << 52, torch.int64),
    torch.float32: _Limits(0xFF << 23, torch.int32),
    torch.bfloat16: _Limits(0xFF << 7, torch.int16),
    torch.float16: _Limits(0x1F << 10, torch.int16),
}
