"""Files of objects in Arrow's IPC format, with one uint8 column. The bytes begin at a multiple of 4 KiB, so a memory
map of the file gives the object.

Any Arrow reader opens the files. The schema's metadata describes the object in JSON.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataplane.core.errors import ChecksumError

ALIGN = 4096
OVERHEAD_BYTES = 16 * 1024
"""The most bytes that a file takes in addition to its body, with metadata of ordinary size."""
_KEY = b"dataplane"
_PAD = b"pad"


def write_ipc(path: Path, data: np.ndarray, about: Mapping[str, Any]) -> int:
    """Write a new file and return the offset of its body. OSError if the disk refuses it."""
    text = json.dumps(about, separators=(",", ":"))
    schema = _schema(text, 0)
    for _ in range(8):
        missing = -_body_offset(schema) % ALIGN
        if not missing:
            break
        schema = _schema(text, len(schema.metadata[_PAD]) + missing)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(_batch(schema, pa.py_buffer(data)))
    offset, nbytes, _ = read_ipc(path)
    assert nbytes == data.nbytes and (offset % ALIGN == 0 or not nbytes), (offset, nbytes)
    return offset


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


def _schema(text: str, pad: int) -> pa.Schema:
    return pa.schema([("data", pa.uint8())], metadata={_KEY: text, _PAD: " " * pad})


def _batch(schema: pa.Schema, data: pa.Buffer) -> pa.RecordBatch:
    return pa.record_batch([pa.Array.from_buffers(pa.uint8(), data.size, [None, data])], schema=schema)


def _body_offset(schema: pa.Schema) -> int:
    """Return the offset of the body in a file with this schema. It is found by writing a small file in memory."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(_batch(schema, pa.py_buffer(bytes(64))))
    whole = sink.getvalue()
    return pa.ipc.open_file(whole).get_batch(0).column(0).buffers()[1].address - whole.address
