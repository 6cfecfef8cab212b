"""Reads the header of a safetensors file, which lists its tensors. No torch here."""

from __future__ import annotations

from pathlib import Path

LENGTH_BYTES = 8
"""The size in bytes of the field for the header's length, little-endian, at the beginning of the file; the header
follows, then the tensors."""


def read_header(path: Path) -> bytes:
    """Return the header, which is JSON: each tensor's dtype, shape and data_offsets by its name. The offsets count from
    the end of the header. The key `__metadata__` is no tensor."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(LENGTH_BYTES), "little"))
