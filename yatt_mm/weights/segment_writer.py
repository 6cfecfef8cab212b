"""Writing a segment: made once at its size, its pages there before the first copy, rewritten in place ever after."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from yatt_mm.weights.checked_copy import copy_finite
from yatt_mm.weights.segment import ALIGNMENT_BYTES, HEADER, Header, Layout, TensorMeta, views


class SegmentWriter:
    """A segment that this process may write into. Several processes may write different parts at the same time.

    One of them calls `begin` before all, and `seal` after all; in between every reader is refused.
    """

    def __init__(self, path: str | Path, metas: Sequence[TensorMeta]) -> None:
        """Map the segment at `path`, which `prepare` made for the same tensors."""
        self.path = Path(path)
        self._layout = Layout.of(metas)
        with self.path.open("r+b") as file:
            # page tables for all of it now: a fault for every page costs more than the copy
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapped = mmap.mmap(file.fileno(), self._layout.num_bytes, flags=flags)
        self.places = dict(views(torch.frombuffer(self._mapped, dtype=torch.uint8), self._layout.index))
        """Every tensor by its name, as a view of the file."""

    @staticmethod
    def prepare(path: str | Path, metas: Sequence[TensorMeta]) -> None:
        """Make the file, unless there is one for the same tensors. It appears whole, and unsealed.

        Raises OSError where there is no room for it: memory is taken here, never in the middle of a publish.
        """
        target, layout = Path(path), Layout.of(metas)
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
        """From here on the segment is torn."""
        header = self._header()
        self._write(header._replace(sequence=header.sequence | 1))

    def seal(self, version: int) -> None:
        """From here on the segment is whole, and holds the policy of this version."""
        header = self._header()
        assert not header.is_sealed, "seal without begin"
        self._write(header._replace(version=version))
        self._write(header._replace(version=version, sequence=header.sequence + 1))

    def _header(self) -> Header:
        return Header(*HEADER.unpack_from(self._mapped))

    def _write(self, header: Header) -> None:
        HEADER.pack_into(self._mapped, 0, *header)


class _Meta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def write_segment(path: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int = 0) -> Path:
    """Write tensors that one process has, as a segment of their own or over an equal one; returns the path.

    Raises NonFiniteWeightsError, and leaves the segment unsealed, where a value is not finite.
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


def _is_for(path: Path, layout: Layout) -> bool:
    if not path.exists() or path.stat().st_size != layout.num_bytes:
        return False
    with path.open("rb") as file:
        found = Header(*HEADER.unpack(file.read(HEADER.size)))
        file.seek(ALIGNMENT_BYTES)
        return found == layout.header(found.sequence, found.version) and file.read(len(layout.index)) == layout.index
