"""One file that holds every tensor of a model: how a published policy reaches the engines of a host.

The file lies in shared memory (or on disk: the format is the same), written once by the trainer and mapped by
every engine of the host. Its index is inside, so only the path travels:

    magic | offset of the index | length of the index | tensors, each at a multiple of 64 | index (JSON)

Left out: who makes and removes the path, and versions (whoever publishes names the file).
"""

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

MAGIC = b"YATTSEG1"
ALIGNMENT_BYTES = 64

_HEADER = struct.Struct("<8sQQ")


class SegmentError(ValueError):
    """A file that is not a whole weight segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSegment:
    """What was written."""

    path: str
    num_tensors: int
    num_bytes: int
    """Size of the file, header and index included."""


def write_segment(path: str | Path, buckets: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> WeightSegment:
    """Write the buckets' tensors to `path`, which appears whole or not at all.

    Tensors are copied as they arrive: a generator that exports one bucket at a time never needs to hold two.
    Raises ValueError when a name comes twice.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with draft.open("xb") as file:
            file.write(bytes(ALIGNMENT_BYTES))
            index = _write_tensors(file, buckets)
            index_offset = file.tell()
            encoded = json.dumps(index).encode()
            file.write(encoded)
            file.seek(0)
            file.write(_HEADER.pack(MAGIC, index_offset, len(encoded)))
        draft.rename(target)
    finally:
        draft.unlink(missing_ok=True)
    return WeightSegment(path=str(target), num_tensors=len(index), num_bytes=index_offset + len(encoded))


def read_segment(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor as a view of the mapped file, in the order they were written: nothing is copied.

    The mapping is private: writing into a view changes no one else's. It lasts until its last view is
    collected, also after the file was unlinked. Raises SegmentError when the file is not a whole segment.
    """
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < ALIGNMENT_BYTES:
            raise SegmentError(f"{path} holds {size} bytes; a weight segment has at least {ALIGNMENT_BYTES}")
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for name, dtype, shape, offset, num_elements in _read_index(path, mapped):
        if not num_elements:
            yield name, torch.empty(shape, dtype=_DTYPES[dtype])
            continue
        flat = torch.frombuffer(mapped, dtype=_DTYPES[dtype], count=num_elements, offset=offset)
        yield name, flat.view(shape)


_DTYPES = {
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

_IndexRow = tuple[str, str, list[int], int, int]
"""Name, dtype, shape, offset in the file, number of elements."""


def _write_tensors(file: BinaryIO, buckets: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> list[_IndexRow]:
    index: list[_IndexRow] = []
    seen: set[str] = set()
    for bucket in buckets:
        for name, tensor in bucket:
            if name in seen:
                raise ValueError(f"tensor {name!r} comes twice; a segment holds each name once")
            seen.add(name)
            file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in _DTYPES:
                raise ValueError(f"tensor {name!r} is {dtype}; a segment holds {', '.join(_DTYPES)}")
            index.append((name, dtype, list(tensor.shape), file.tell(), tensor.numel()))
            flat = tensor.detach().cpu().contiguous().view(-1)
            file.write(np.from_dlpack(flat.view(torch.uint8)).data)  # `.numpy()` would keep it from being released
    return index


def _read_index(path: str | Path, mapped: mmap.mmap) -> list[_IndexRow]:
    magic, offset, length = _HEADER.unpack_from(mapped)
    if magic != MAGIC or offset + length != len(mapped):
        raise SegmentError(
            f"{path} starts with {magic!r} and promises {offset + length} bytes of {len(mapped)}; "
            f"wanted a whole segment that starts with {MAGIC!r}: write it again with write_segment"
        )
    return [tuple(row) for row in json.loads(mapped[offset : offset + length])]
