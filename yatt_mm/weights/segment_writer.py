"""Writing a segment file: makes it once at its full size, then rewrites it in place.

All its memory is allocated and mapped before the first copy. The format is in `segment`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from yatt_mm.weights.checked_copy import copy_finite
from yatt_mm.weights.segment import ALIGNMENT_BYTES, HEADER, Header, SegmentLayout, TensorMeta, views


class SegmentWriter:
    """A segment that this process can write. Several processes may write different parts at the same time.

    One of them calls `begin` before all others write, and `seal` after all have finished. In between, readers get a
    SegmentError.
    """

    def __init__(self, path: str | Path, metas: Sequence[TensorMeta]) -> None:
        """Map the segment at `path`. `prepare` must have made it for the same tensors."""
        self.path = Path(path)
        self._layout = SegmentLayout.of(metas)
        with self.path.open("r+b") as file:
            # fill the page tables now: one page fault per page would cost more than the copy
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapped = mmap.mmap(file.fileno(), self._layout.num_bytes, flags=flags)
        self.places = dict(views(torch.frombuffer(self._mapped, dtype=torch.uint8), self._layout.index))
        """[name] The tensor as a writable view of the file."""

    @staticmethod
    def prepare(path: str | Path, metas: Sequence[TensorMeta]) -> None:
        """Make the file, unless it already exists for the same tensors. It appears at its full size, and unsealed.

        All memory is allocated here, never in the middle of a publish. Raises OSError if there is no room.
        """
        target, layout = Path(path), SegmentLayout.of(metas)
        if _is_for(target, layout):
            return
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with draft.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, layout.num_bytes)
                file.write(HEADER.pack(*layout.header(sequence=1, version=0)))
                file.seek(ALIGNMENT_BYTES)
                file.write(layout.index)
            draft.rename(target)
        finally:
            draft.unlink(missing_ok=True)

    def begin(self) -> None:
        """Mark the segment as being written; readers refuse it from now on."""
        header = self._header()
        self._write(header._replace(sequence=header.sequence | 1))

    def seal(self, version: int) -> None:
        """Mark the segment as complete, with the policy of this version."""
        header = self._header()
        assert not header.is_sealed, "call begin before seal"
        self._write(header._replace(version=version))
        self._write(header._replace(version=version, sequence=header.sequence + 1))

    def _header(self) -> Header:
        return Header(*HEADER.unpack_from(self._mapped))

    def _write(self, header: Header) -> None:
        HEADER.pack_into(self._mapped, 0, *header)


class _Meta(NamedTuple):
    """A `TensorMeta` of a tensor that this process holds."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def write_segment(path: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int = 0) -> Path:
    """Write tensors of this process as a whole segment, and return its path.

    A segment that already exists for the same tensors is written in place.

    Raises NonFiniteWeightsError, and leaves the segment unsealed, if a value is not finite.
    """
    named = list(tensors)
    metas = [_Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    SegmentWriter.prepare(path, metas)
    writer = SegmentWriter(path, metas)
    writer.begin()
    for name, tensor in named:
        copy_finite(name, tensor.detach(), writer.places[name])
    writer.seal(version)
    return writer.path


def _is_for(path: Path, layout: SegmentLayout) -> bool:
    """Return True if there is a segment at `path` with the same tensors in the same places."""
    if not path.exists() or path.stat().st_size != layout.num_bytes:
        return False
    with path.open("rb") as file:
        found = Header(*HEADER.unpack(file.read(HEADER.size)))
        file.seek(ALIGNMENT_BYTES)
        return found == layout.header(found.sequence, found.version) and file.read(len(layout.index)) == layout.index
