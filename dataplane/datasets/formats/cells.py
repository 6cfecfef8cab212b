"""Converts cells of Arrow columns to Python values; bytes become views of Arrow's memory."""

from typing import Any

import numpy as np
import pyarrow as pa

from dataplane.datasets.formats.columns import is_list


def cell_of(column: pa.ChunkedArray, at: int) -> Any:
    """Return the value of a column in one row. A cell of bytes is returned as a memoryview."""
    for chunk in column.chunks:
        if at < len(chunk):
            return _value(chunk, at)
        at -= len(chunk)
    raise IndexError(f"row {at} past the end of a column")


def _value(array: pa.Array, at: int) -> Any:
    if isinstance(array, pa.ExtensionArray):
        return _value(array.storage, at)
    if array.slice(at, 1).null_count:
        return None
    kind = array.type
    if pa.types.is_struct(kind):
        return {kind.field(child).name: _value(array.field(child), at) for child in range(kind.num_fields)}
    if is_list(kind):
        start, end = _list_span(array, at)
        return [_value(array.values, place) for place in range(start, end)]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        start, end = _span(array, at, pa.types.is_large_binary(kind))
        data = array.buffers()[2]
        return memoryview(data)[start:end] if data is not None else memoryview(b"")
    return array[at].as_py()


def _list_span(array: pa.Array, at: int) -> tuple[int, int]:
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return (array.offset + at) * size, (array.offset + at + 1) * size
    return _span(array, at, pa.types.is_large_list(array.type))


def _span(array: pa.Array, at: int, is_large: bool) -> tuple[int, int]:
    offsets = np.frombuffer(array.buffers()[1], np.int64 if is_large else np.int32)
    return int(offsets[array.offset + at]), int(offsets[array.offset + at + 1])
