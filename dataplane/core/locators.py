"""Where objects lie in a node's memory, as the answer to a resolve: a record batch, or the same columns as JSON.

Any Arrow client reads the record batch. Our readers ask for JSON where they resolve few objects: to make Arrow arrays
of a few numbers each, and to read them back, took longer than everything else in the round trip of one.
"""

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pyarrow as pa

from dataplane.core.errors import DataPlaneError
from dataplane.core.json_body import dump
from dataplane.core.schemas import ITEM_BYTES, LOCATORS

JSON_UP_TO = 96
"""Objects in one answer; from about here on packed columns are faster than text."""

_DTYPES = list(ITEM_BYTES)
_DTYPE_CODE = {name: code for code, name in enumerate(_DTYPES)}
_DTYPE_NAMES = pa.array(_DTYPES)
_DTYPE, _SHAPE = LOCATORS.field("dtype").type, LOCATORS.field("shape").type


@dataclass(frozen=True, slots=True)
class Locators:
    """Columns with a row per object asked for."""

    segment: Sequence[int]
    offset: Sequence[int]
    """-1 where the object is not resident; the other columns mean nothing there."""
    nbytes: Sequence[int]
    dtype: Sequence[str]
    shape: Sequence[Sequence[int]]
    version: Sequence[int]
    lease: Sequence[int]
    files: list[dict[str, Any]] = field(default_factory=list)
    """path, nbytes, device, inode of what segments 1, 2, ... mean in this answer; 0 is the node's arena."""

    def to_batch(self) -> pa.RecordBatch:
        """The record batch of `LOCATORS`, out of packed columns."""
        count = len(self.offset)
        ends: list[int] = [0]
        dims: list[int] = []
        for shape in self.shape:
            dims += shape
            ends.append(len(dims))
        codes = pa.py_buffer(bytes([_DTYPE_CODE[name] for name in self.dtype]))
        shapes = [None, pa.py_buffer(array("i", ends))]
        columns = [
            _column(pa.int32(), "i", self.segment),
            _column(pa.int64(), "q", self.offset),
            _column(pa.int64(), "q", self.nbytes),
            pa.DictionaryArray.from_buffers(_DTYPE, count, [None, codes], _DTYPE_NAMES, 0),
            pa.Array.from_buffers(_SHAPE, count, shapes, 0, children=[_column(pa.int64(), "q", dims)]),
            _column(pa.int64(), "q", self.version),
            _column(pa.int64(), "q", self.lease),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=LOCATORS)

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch, files: Sequence[dict[str, Any]] = ()) -> "Locators":
        """The reverse of `to_batch`, with the files that came beside it."""
        segments, offsets, sizes, dtypes, shapes, versions, leases = batch.columns
        names = dtypes.dictionary.to_pylist()
        ends, dims = _numbers(shapes.offsets, "i"), _numbers(shapes.values, "q")
        return cls(
            segment=_numbers(segments, "i"),
            offset=_numbers(offsets, "q"),
            nbytes=_numbers(sizes, "q"),
            dtype=[names[code] for code in _numbers(dtypes.indices, "b")],
            shape=[dims[start:end] for start, end in itertools.pairwise(ends)],
            version=_numbers(versions, "q"),
            lease=_numbers(leases, "q"),
            files=list(files),
        )

    def to_json(self) -> bytes:
        """The same columns as a JSON object."""
        return dump({"locators": {name: getattr(self, name) for name in _NAMES}})

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Locators":
        """The reverse of `to_json`. DataPlaneError if the node answered something else."""
        columns = body.get("locators")
        if not isinstance(columns, dict) or not columns.keys() >= _NAMES:
            raise DataPlaneError(f"a node answered resolve with {str(body)[:80]}; wanted locators")
        return cls(*(columns[name] for name in _NAMES))


_NAMES = dict.fromkeys(column.name for column in fields(Locators)).keys()


def _numbers(column: pa.Array, code: Literal["b", "i", "q"]) -> list[int]:
    if not len(column):
        return []
    values = memoryview(column.buffers()[1]).cast("b").cast(code)
    return values[column.offset : column.offset + len(column)].tolist()


def _column(kind: pa.DataType, code: str, values: Iterable[int]) -> pa.Array:
    packed = array(code, values)
    return pa.Array.from_buffers(kind, len(packed), [None, pa.py_buffer(packed)], 0)
