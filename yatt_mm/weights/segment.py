"""One file that holds every tensor of a model: how a published policy reaches the processes of a host.

The file lies in shared memory (or on disk: the format is the same). It is made once at its final size and written
in place by every publish: fresh pages cost several times what the copy into warm ones does. Its index is inside, so
only the path travels:

    magic | sequence | version | index offset | index length | index (JSON) | tensors, each at a multiple of 64

The sequence is odd while somebody writes and grows with every write, so that a reader can tell a torn model from a
whole one, and one that was written while it read. Left out: writing (`writing`), who makes and removes the path.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

MAGIC = b"YATTSEG2"
ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
HEADER = struct.Struct("<8sQQQQ")

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}


class SegmentError(ValueError):
    """A file that is not a whole weight segment, or not the one that was wanted."""


class TensorMeta(Protocol):
    """A tensor that will be written: `models.weights.export_plan.WeightMeta` is one."""

    @property
    def name(self) -> str:
        """Unique in its segment."""

    @property
    def dtype(self) -> torch.dtype:
        """One of DTYPES."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the full tensor."""


class Header(NamedTuple):
    """The first bytes of the file, as HEADER packs them; all but the magic are unsigned 64-bit numbers."""

    magic: bytes
    sequence: int
    """Odd while the tensors are being written, and after a writer died."""
    version: int
    """Policy version of the tensors."""
    index_offset: int
    index_length: int

    @property
    def is_sealed(self) -> bool:
        """True where the tensors are whole."""
        return self.sequence % 2 == 0


class Row(NamedTuple):
    """A tensor of the index."""

    name: str
    dtype: str
    shape: Sequence[int]
    offset: int
    """From the first tensor."""

    @property
    def num_bytes(self) -> int:
        """Of the tensor, without what aligns the next one."""
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything lies in the file of a model: the same for everyone who knows its tensors."""

    index: bytes
    num_bytes: int
    """Size of the file."""

    @classmethod
    def of(cls, metas: Sequence[TensorMeta]) -> Layout:
        """Raises ValueError for a name that comes twice or a dtype that a segment cannot hold."""
        names = [meta.name for meta in metas]
        for meta in metas:
            if str(meta.dtype).removeprefix("torch.") not in DTYPES:
                raise ValueError(f"tensor {meta.name!r} is {meta.dtype}; a segment holds {', '.join(DTYPES)}")
        if len(set(names)) != len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ValueError(f"tensor {twice!r} comes twice; a segment holds each name once")
        # offsets count from the first tensor, whose place depends on the length of the index
        rows, offset = [], 0
        for meta in metas:
            rows.append(Row(meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape), offset))
            num_bytes = torch.Size(meta.shape).numel() * meta.dtype.itemsize
            offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        index = json.dumps(rows).encode()
        return cls(index=index, num_bytes=_first_tensor(len(index)) + offset)

    def header(self, sequence: int, version: int) -> Header:
        """The file's header."""
        return Header(MAGIC, sequence, version, ALIGNMENT_BYTES, len(self.index))


class MappedSegment:
    """A segment in this process's memory. Views last until the last of them is collected, whatever becomes of the file.

    They show what writers write: take them between a publish and the next, and call `check_unchanged` afterwards.
    """

    def __init__(self, path: str | Path, version: int | None = None) -> None:
        """Map for reading; writing into a view changes no one else's.

        Raises SegmentError where the file is not a whole segment, or holds another version than the given one.
        """
        self.path = Path(path)
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < ALIGNMENT_BYTES:
                raise SegmentError(f"{path} holds {size} bytes; a weight segment has at least {ALIGNMENT_BYTES}")
            # what is in the first page is written by others too: this mapping is never written to there
            self._mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.header = self._read_header()
        if version is not None and self.header.version != version:
            raise SegmentError(
                f"{path} holds the policy of version {self.header.version}, not the wanted {version}: publish it first"
            )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor as a view, in the order of the index: nothing is copied."""
        offset, length = self.header.index_offset, self.header.index_length
        yield from views(torch.frombuffer(self._mapped, dtype=torch.uint8), self._mapped[offset : offset + length])

    def check_unchanged(self) -> None:
        """Raises SegmentError where the tensors were written again since this was mapped."""
        found = self._read_header()
        if found != self.header:
            raise SegmentError(
                f"{self.path} was written while it was read (sequence {self.header.sequence}, now "
                f"{found.sequence}): what was read is torn; publish only when every reader is done"
            )

    def _read_header(self) -> Header:
        header = Header(*HEADER.unpack_from(self._mapped))
        size = len(self._mapped)
        if header.magic != MAGIC or header.index_offset + header.index_length > size:
            raise SegmentError(
                f"{self.path} starts with {header.magic!r} and has {size} bytes; wanted a whole segment that starts "
                f"with {MAGIC!r}: write it again"
            )
        if not header.is_sealed:
            raise SegmentError(
                f"{self.path} is being written, or its writer died (sequence {header.sequence}); publish again"
            )
        return header


def read_segment(path: str | Path, version: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a segment as a view, then a check that nobody wrote meanwhile. Raises as `MappedSegment` does."""
    segment = MappedSegment(path, version)
    yield from segment
    segment.check_unchanged()


def views(flat: torch.Tensor, index: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of an index, in the bytes of a whole segment. Raises SegmentError where there are too few."""
    first = _first_tensor(len(index))
    for row in map(Row._make, json.loads(index)):
        if first + row.offset + row.num_bytes > len(flat):
            raise SegmentError(f"a segment of {len(flat)} bytes is too short for its {row.name}: it was cut off")
        yield row.name, view_of(row, flat, -first)


def view_of(row: Row, flat: torch.Tensor, begin: int) -> torch.Tensor:
    """A tensor of an index in bytes of which the first has the offset `begin`."""
    at = row.offset - begin
    return flat[at : at + row.num_bytes].view(DTYPES[row.dtype]).view(torch.Size(row.shape))


def _first_tensor(index_length: int) -> int:
    """Offset of the first tensor: a page of its own."""
    return -(-(ALIGNMENT_BYTES + index_length) // PAGE_BYTES) * PAGE_BYTES
