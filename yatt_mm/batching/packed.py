"""Values in a compact form, for those that pass them on without a look at them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pyarrow as pa

T = TypeVar("T")

CODEC = "zstd"
SMALL_BYTES = 500
"""Smaller values are not compressed."""


@dataclass(frozen=True, slots=True)
class Packed(Generic[T]):
    """A value as bytes. Refs of one step repeat each other, and take a fifth of their bytes."""

    data: bytes
    num_bytes: int
    """The bytes of the value before they were compressed; 0 if they were not."""

    @classmethod
    def of(cls, value: T) -> Packed[T]:
        """Return a value, which can be pickled, as bytes."""
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) < SMALL_BYTES:
            return cls(data, 0)
        return cls(pa.compress(data, codec=CODEC, asbytes=True), len(data))

    def open(self) -> T:
        """Return the value."""
        data: Any = pa.decompress(self.data, self.num_bytes, codec=CODEC) if self.num_bytes else self.data
        value: T = pickle.loads(data)
        return value
