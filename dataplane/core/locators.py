"""Locators: where objects are in a node's memory. A node replies to a resolve with them, as a record batch or as JSON.

Both forms hold the same columns. Any Arrow client can read the record batch. Our readers ask for JSON when they
resolve few objects: making and reading Arrow arrays of a few numbers each took longer than the rest of a round trip.
"""

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pyarrow as pa

from dataplane.core.arrays import ITEM_BYTES
from dataplane.core.errors import DataPlaneError
from dataplane.core.json_body import dump
from dataplane.core.schemas import LOCATORS, packed_numbers, packed_strings

MAX_JSON_OBJECTS = 96
"""The largest number of objects in a JSON reply; above about this number the record batch is faster."""

_DTYPES = list(ITEM_BYTES)
_DTYPE_CODE = {name: code for code, name in enumerate(_DTYPES)}
_DTYPE_NAMES = packed_strings([name.encode() for name in _DTYPES])
_DTYPE, _SHAPE = LOCATORS.field("dtype").type, LOCATORS.field("shape").type


@dataclass(frozen=True, slots=True)
class Locators:
    """The columns of a resolve's reply, with one row per requested object."""

    segment: Sequence[int]
    """The memory that each object is in: 0 for the node's arena; n for the spilled object's file in `files[n - 1]`."""
    offset: Sequence[int]
    """The bytes from the start of the segment to each object. -1 means that the object is not resident; then the other
    columns mean nothing."""
    nbytes: Sequence[int]
    dtype: Sequence[str]
    """The numpy dtype name of each object."""
    shape: Sequence[Sequence[int]]
    version: Sequence[int]
    """The version of each plain object; 0 for other kinds."""
    lease: Sequence[int]
    """The number of the lease that this reply granted on each object."""
    files: list[dict[str, Any]] = field(default_factory=list)
    """The path, nbytes, device and inode of the files that the segments 1, 2, ... of this reply mean."""

    def to_batch(self) -> pa.RecordBatch:
        """Return the columns as a record batch of the schema `LOCATORS`. It is built from packed arrays, which is
        fast."""
        count = len(self.offset)
        ends: list[int] = [0]
        dims: list[int] = []
        for shape in self.shape:
            dims += shape
            ends.append(len(dims))
        codes = pa.py_buffer(bytes([_DTYPE_CODE[name] for name in self.dtype]))
        shapes = [None, pa.py_buffer(array("i", ends))]
        columns = [
            packed_numbers(pa.int32(), "i", self.segment),
            packed_numbers(pa.int64(), "q", self.offset),
            packed_numbers(pa.int64(), "q", self.nbytes),
            pa.DictionaryArray.from_buffers(_DTYPE, count, [None, codes], _DTYPE_NAMES, 0),
            pa.Array.from_buffers(_SHAPE, count, shapes, 0, children=[packed_numbers(pa.int64(), "q", dims)]),
            packed_numbers(pa.int64(), "q", self.version),
            packed_numbers(pa.int64(), "q", self.lease),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=LOCATORS)

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch, files: Sequence[dict[str, Any]] = ()) -> "Locators":
        """Return the locators of a record batch that `to_batch` made. `files` are sent next to the record batch."""
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
        """Return the columns as a JSON body."""
        return dump({"locators": {name: getattr(self, name) for name in _NAMES}})

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Locators":
        """Return the locators of a JSON object that `to_json` made. Raises DataPlaneError if the node replied something
        else."""
        columns = body.get("locators")
        if not isinstance(columns, dict) or not columns.keys() >= _NAMES:
            raise DataPlaneError(f"a node answered resolve with {str(body)[:80]}; wanted locators")
        return cls(*(columns[name] for name in _NAMES))


_NAMES = dict.fromkeys(column.name for column in fields(Locators)).keys()
"""The names of the columns, in the order of the fields."""


def _numbers(column: pa.Array, code: Literal["b", "i", "q"]) -> list[int]:
    """Return a primitive Arrow column as a list. `code` is the struct format character of its items."""
    if not len(column):
        return []
    values = memoryview(column.buffers()[1]).cast("b").cast(code)
    return values[column.offset : column.offset + len(column)].tolist()
