"""Files of objects in Arrow's IPC format, with one uint8 column. The bytes begin at a multiple of 4 KiB, so a memory
map of the file gives the object.

Any Arrow reader opens the files. The schema's metadata describes the object in JSON, with spaces after it. The
description has the digest of all bytes of the file that are not the object's: a changed bit there is found too.
"""

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from dataplane.core.digests import digest_of
from dataplane.core.errors import ChecksumError

ALIGN = 4096
OVERHEAD_BYTES = 16 * 1024
"""The most bytes that a file takes in addition to its body, with metadata of ordinary size."""
_MAX_OFFSET = 1 << 40
"""An offset with more digits than any offset of a body."""
_KEY = b"dataplane"
_DIGEST_KEY = b'"frame":"'
_BLANK = "0" * 32
_MAX_FRAME_BYTES = 16 << 20
"""The most bytes before and after a body; a damaged description could say that there are more."""
_BLOCK = 256
"""Descriptions take whole blocks of this many characters, so that few layouts exist."""


def write_ipc(path: Path, data: np.ndarray, about: Mapping[str, Any]) -> int:
    """Write a new file and return the offset of its body. OSError if the disk refuses it."""
    nbytes = data.nbytes
    length, offset = _layout(-(-len(_described(about, _MAX_OFFSET, nbytes)) // _BLOCK))
    schema = _schema(_described(about, offset, nbytes).ljust(length))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(_batch(schema, pa.py_buffer(data)))
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        frame = _frame(fd, offset, nbytes)
        digest = _digest(frame)
        for start, part in frame:
            os.pwrite(fd, digest, start + _place(part))
    finally:
        os.close(fd)
    return offset if nbytes else 0


def read_ipc(path: Path) -> tuple[int, int, dict[str, Any]]:
    """Return the offset of the body, its size in bytes, and the description, without reading the body. ChecksumError
    for any other kind of file, and for a file that was changed outside of its body."""
    text = ""
    try:
        with pa.OSFile(str(path)) as source:
            text = pa.ipc.open_file(source).schema.metadata[_KEY].decode()
        about = json.loads(text)
        offset, nbytes, _ = (about.pop(key) for key in ("offset", "nbytes", "frame"))
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            frame = _frame(fd, offset, nbytes)
        finally:
            os.close(fd)
        found = _digest(frame)
        written = {part[_place(part) :][: len(_BLANK)] for _, part in frame}
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise ChecksumError(
            f"{path} is no whole Arrow file of an object ({str(error)[:120]}); it was damaged"
        ) from error
    if written != {found}:
        raise ChecksumError(
            f"the description in {path} has checksum {found.decode()}, another was written: it was damaged; it says "
            f"{text[:120]}"
        )
    return offset if nbytes else 0, nbytes, about


def _described(about: Mapping[str, Any], offset: int, nbytes: int) -> str:
    """Return the description as JSON, with a blank in place of the digest, which comes last."""
    return json.dumps({**about, "offset": offset, "nbytes": nbytes, "frame": _BLANK}, separators=(",", ":"))


def _frame(fd: int, offset: int, nbytes: int) -> list[tuple[int, bytes]]:
    """Return what comes before and after the body: the start and bytes of each. ValueError if that cannot be."""
    end, size = offset + nbytes, os.fstat(fd).st_size
    if not 0 <= offset <= end <= size or max(offset, size - end) > _MAX_FRAME_BYTES:
        raise ValueError(f"{nbytes} bytes at {offset} in a file of {size}")
    return [(0, os.pread(fd, offset, 0)), (end, os.pread(fd, size - end, end))]


def _digest(frame: list[tuple[int, bytes]]) -> bytes:
    """Return the digest of a frame, in which each copy of the digest itself is left out."""
    hashed = blake3()
    for _, part in frame:
        at = _place(part)
        hashed.update(part[:at])
        hashed.update(part[at + len(_BLANK) :])
    return digest_of(hashed).encode()


def _place(part: bytes) -> int:
    """Return where a part of a frame has its copy of the digest. ValueError if it has none."""
    return part.rindex(_DIGEST_KEY) + len(_DIGEST_KEY)


@lru_cache(maxsize=1024)
def _layout(num_blocks: int) -> tuple[int, int]:
    """Return the length of a description of up to `num_blocks` blocks, with the spaces that make the body begin at a
    multiple of `ALIGN`; and the offset of that body."""
    length = num_blocks * _BLOCK
    while missing := -(offset := _body_offset(length)) % ALIGN:
        length += missing
    return length, offset


def _schema(text: str) -> pa.Schema:
    return pa.schema([("data", pa.uint8())], metadata={_KEY: text})


def _batch(schema: pa.Schema, data: pa.Buffer) -> pa.RecordBatch:
    return pa.record_batch([pa.Array.from_buffers(pa.uint8(), data.size, [None, data])], schema=schema)


def _body_offset(length: int) -> int:
    """Return the offset of the body in a file with a description of this length. It is found by writing a small file in
    memory."""
    sink = pa.BufferOutputStream()
    schema = _schema(" " * length)
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(_batch(schema, pa.py_buffer(bytes(64))))
    whole = sink.getvalue()
    return pa.ipc.open_file(whole).get_batch(0).column(0).buffers()[1].address - whole.address
