"""Files of objects in Arrow's IPC format, with one uint8 column. The bytes begin at a multiple of 4 KiB, so a memory
map of the file gives the object.

Any Arrow reader opens the files. The schema's metadata describes the object in JSON, with spaces after it.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataplane.core.errors import ChecksumError

ALIGN = 4096
OVERHEAD_BYTES = 16 * 1024
"""The most bytes that a file takes in addition to its body, with metadata of ordinary size."""
_KEY = b"dataplane"
_BLOCK = 256
"""Descriptions take whole blocks of this many characters, so that few layouts exist."""


def write_ipc(path: Path, data: np.ndarray, about: Mapping[str, Any]) -> int:
    """Write a new file and return the offset of its body. OSError if the disk refuses it."""
    text = json.dumps(about, separators=(",", ":"))
    length, offset = _layout(-(-len(text) // _BLOCK))
    schema = _schema(text.ljust(length))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(_batch(schema, pa.py_buffer(data)))
    return offset if data.nbytes else 0


def read_ipc(path: Path) -> tuple[int, int, dict[str, Any]]:
    """Return the offset of the body, its size in bytes, and the description. ChecksumError for any other kind of
    file."""
    try:
        with pa.memory_map(str(path)) as source:
            whole = source.read_buffer()
            file = pa.ipc.open_file(whole)
            about = json.loads(file.schema.metadata[_KEY])
            column = file.get_batch(0).column(0)
            offset = column.buffers()[1].address - whole.address if len(column) else 0
            return offset, len(column), about
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ChecksumError(
            f"{path} is no whole Arrow file of an object ({str(error)[:120]}); it was damaged"
        ) from error


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
