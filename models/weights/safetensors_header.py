"""The beginning of a safetensors file: what says which tensors it holds. No torch here."""

from __future__ import annotations

from pathlib import Path

LENGTH_BYTES = 8
"""Before the header stands its length, little-endian; behind it the tensors' bytes."""


def read_header(path: Path) -> bytes:
    """JSON: [name] dtype, shape and data_offsets behind the header; `__metadata__` is no tensor."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(LENGTH_BYTES), "little"))
