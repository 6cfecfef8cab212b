"""The segment file: one file with every tensor of a model, through which a published policy reaches a host's engines.

The file is in shared memory (the format also works on disk). It is made once at its final size, and every publish
writes it in place, because copying into new pages costs several times as much as into pages that are already mapped.
The index is inside the file, so only the path is sent to engines:

    magic | sequence | version | index offset | index length | index (JSON) | tensors, each at a multiple of 64

The sequence is odd while a rank writes, and grows with every write. So a reader can tell a complete model from an
incomplete one, and notices a write that happened while it read. Left out: writing the file (`segment_writer`), and
making and removing its path.
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
"""The first eight bytes of a segment file, with the version of the format."""
ALIGNMENT_BYTES = 64
"""The offset of each tensor is a multiple of this; also the space for the header, so the index starts here."""
PAGE_BYTES = 4096
"""The first tensor begins at a multiple of this."""
HEADER = struct.Struct("<8sQQQQ")
"""The binary form of `Header`."""

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
"""[name] The dtypes that a segment can hold."""


class SegmentError(ValueError):
    """A file is not a complete weight segment, or holds another policy version than the expected one."""


class TensorMeta(Protocol):
    """The description of a tensor that will be written, for example `models.weights.export_plan.WeightMeta`."""

    @property
    def name(self) -> str:
        """The tensor's name, unique in its segment."""

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype, one of DTYPES."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""


class Header(NamedTuple):
    """The first bytes of the file, as HEADER packs them. All fields but the magic are unsigned 64-bit numbers."""

    magic: bytes
    sequence: int
    """Odd while the tensors are being written, and after a writer died in the middle of a write."""
    version: int
    """The policy version of the tensors."""
    index_offset: int
    index_length: int

    @property
    def is_sealed(self) -> bool:
        """True if the tensors are complete."""
        return self.sequence % 2 == 0


class Row(NamedTuple):
    """One tensor in the index."""

    name: str
    dtype: str
    shape: Sequence[int]
    offset: int
    """The number of bytes from the start of the first tensor."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor, without the padding that aligns the next one."""
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLayout:
    """The places of the index and of the tensors in a weight segment. The same tensors always give the same places."""

    index: bytes
    """The index of the tensors, as a JSON list of `Row`s."""
    num_bytes: int
    """The size of the file in bytes."""

    @classmethod
    def of(cls, metas: Sequence[TensorMeta]) -> SegmentLayout:
        """Return the places of these tensors, in their order.

        Raises ValueError if a name appears twice, or if a segment cannot hold a dtype.
        """
        names = [meta.name for meta in metas]
        for meta in metas:
            if str(meta.dtype).removeprefix("torch.") not in DTYPES:
                raise ValueError(f"tensor {meta.name!r} is {meta.dtype}; a segment holds {', '.join(DTYPES)}")
        if len(set(names)) != len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise ValueError(f"tensor {twice!r} comes twice; a segment needs unique names")
        # offsets count from the first tensor, whose place depends on the length of the index
        rows, offset = [], 0
        for meta in metas:
            rows.append(Row(meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape), offset))
            num_bytes = torch.Size(meta.shape).numel() * meta.dtype.itemsize
            offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        index = json.dumps(rows).encode()
        return cls(index=index, num_bytes=_first_tensor(len(index)) + offset)

    def header(self, sequence: int, version: int) -> Header:
        """Return the file's header with this sequence and version."""
        return Header(MAGIC, sequence, version, ALIGNMENT_BYTES, len(self.index))


class MappedSegment:
    """A segment that is mapped into this process's memory, for reading.

    Views stay valid until the last of them is collected, even if the file is removed. They show what writers write in
    the meantime: use them between two publishes, and call `check_unchanged` afterwards.
    """

    def __init__(self, path: str | Path, version: int | None = None) -> None:
        """Map the file. Writing into a view changes only this process's copy.

        Raises SegmentError if the file is not a complete segment, or holds another version than `version` (if given).
        """
        self.path = Path(path)
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < ALIGNMENT_BYTES:
                raise SegmentError(f"{path} holds {size} bytes; a weight segment has at least {ALIGNMENT_BYTES}")
            # this process never writes to the first page, so it still sees what writers change in the header
            self._mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.header = self._read_header()
        if version is not None and self.header.version != version:
            raise SegmentError(
                f"{path} holds the policy of version {self.header.version}, but version {version} is needed: "
                "publish it first"
            )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, view) of every tensor, in the order of the index. Nothing is copied."""
        offset, length = self.header.index_offset, self.header.index_length
        yield from views(torch.frombuffer(self._mapped, dtype=torch.uint8), self._mapped[offset : offset + length])

    def check_unchanged(self) -> None:
        """Raise SegmentError if the tensors were written again since the segment was mapped."""
        found = self._read_header()
        if found != self.header:
            raise SegmentError(
                f"{self.path} was written while it was read (sequence {self.header.sequence}, now "
                f"{found.sequence}): what was read is incomplete; publish only when every reader has finished"
            )

    def _read_header(self) -> Header:
        """Return the header as it is now. Raises SegmentError if the segment is not complete."""
        header = Header(*HEADER.unpack_from(self._mapped))
        size = len(self._mapped)
        if header.magic != MAGIC or header.index_offset + header.index_length > size:
            raise SegmentError(
                f"{self.path} starts with {header.magic!r} and has {size} bytes; a complete segment starts "
                f"with {MAGIC!r}: write it again"
            )
        if not header.is_sealed:
            raise SegmentError(
                f"{self.path} is being written, or its writer died (sequence {header.sequence}); publish again"
            )
        return header


def read_segment(path: str | Path, version: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, view) of every tensor of a segment, then check that no rank wrote in the meantime.

    Raises SegmentError in the cases of `MappedSegment` and `MappedSegment.check_unchanged`.
    """
    segment = MappedSegment(path, version)
    yield from segment
    segment.check_unchanged()


def index_file(path: str | Path) -> Path:
    """Return the file with the index of a model that is published under `path` and is not in a file itself."""
    return Path(f"{path}.index")


def views(flat: torch.Tensor, index: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, view) of every tensor of an index, in `flat`, the bytes of a whole segment.

    Raises SegmentError if there are too few bytes.
    """
    first = _first_tensor(len(index))
    for row in map(Row._make, json.loads(index)):
        if first + row.offset + row.num_bytes > len(flat):
            raise SegmentError(f"a segment of {len(flat)} bytes is too short for its {row.name}: it was cut off")
        yield row.name, view_of(row, flat, -first)


def view_of(row: Row, flat: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the view of one tensor in `flat`. `begin`: the place of the first byte of `flat`, counted in bytes from
    the first tensor of the weights."""
    at = row.offset - begin
    return flat[at : at + row.num_bytes].view(DTYPES[row.dtype]).view(torch.Size(row.shape))


def _first_tensor(index_length: int) -> int:
    """Return the offset of the first tensor in the file: the first page boundary after the index."""
    return -(-(ALIGNMENT_BYTES + index_length) // PAGE_BYTES) * PAGE_BYTES
