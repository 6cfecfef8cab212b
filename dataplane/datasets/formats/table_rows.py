"""Reads the rows of a table: in groups, where some columns are media and the others are fields.

A group is the rows that are read at once (a row group of Parquet, a record batch of Arrow); a class with the Protocol
`Groups` reads it. All of this runs in a parser.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dataplane.core.errors import DatasetError
from dataplane.core.lru_cache import LruCache
from dataplane.datasets.formats.cells import cell_of
from dataplane.datasets.formats.columns import ColumnOptions, split_columns
from dataplane.datasets.formats.json_safe import fields_json
from dataplane.datasets.formats.media_values import CHAT_NAMES, MediaValue, media_of, media_of_chat, without_data
from dataplane.datasets.formats.parsed_rows import ParsedRow
from dataplane.datasets.formats.parser import MAX_GROUP_BYTES
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import Flaw

_UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""The errors of damaged data. ValueError also means text that is not UTF-8."""

_FEW_ROWS = 5


class Groups(Protocol):
    """A file of rows that are read in groups."""

    file: RangeFile

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def starts(self) -> np.ndarray:
        """The first row of each group, and the number of rows: num_groups + 1 numbers."""
        ...

    @property
    def flaws(self) -> Sequence[Flaw]:
        """The parts of the file that cannot be read."""
        ...

    def nbytes(self, group: int, columns: Sequence[str]) -> int:
        """Return an estimate of the bytes of memory that reading these columns takes; 0 if media stay in the file."""
        ...

    def read(self, group: int, columns: Sequence[str], max_bytes: int) -> pa.Table:
        """Return these columns of a group. Raises pa.ArrowException or OSError, or DatasetError if it would take more
        than `max_bytes`."""
        ...

    def offset_in_file(self, address: int) -> int | None:
        """Return the file offset of the bytes at a memory address; None if they are not a copy of a part of the
        file."""
        ...


class TableReader:
    """The rows of one table. Thread-safe, except `file`."""

    def __init__(self, groups: Groups, options: ColumnOptions, tables: "LruCache[pa.Table]") -> None:
        """`tables`: the groups that are kept, those of other files too."""
        self._groups = groups
        self._tables = tables
        self._lock = threading.Lock()
        self.columns = split_columns(groups.schema, options, groups.file.path)
        """The columns that are read."""
        self._check_groups()

    @property
    def file(self) -> RangeFile:
        """The file. It is set again when the same file was opened again."""
        return self._groups.file

    @file.setter
    def file(self, file: RangeFile) -> None:
        self._groups.file = file

    @property
    def num_rows(self) -> int:
        """The number of rows of the table."""
        return int(self._groups.starts[-1])

    @property
    def flaws(self) -> Sequence[Flaw]:
        """The parts of the file that cannot be read."""
        return self._groups.flaws

    def rows(self, wanted: Mapping[int, bool], part: str | None = None) -> Iterator[tuple[int, ParsedRow]]:
        """Yield rows by their numbers, with their media where `wanted` says True. Each group is read once, whatever the
        order of the numbers. With `part`, a row has this medium and nothing else."""
        by_group: dict[int, list[int]] = defaultdict(list)
        for number in wanted:
            by_group[int(np.searchsorted(self._groups.starts, number, side="right")) - 1].append(number)
        for group, members in by_group.items():
            yield from self._rows_of_group(group, {number: wanted[number] for number in members}, part)

    def _rows_of_group(
        self, group: int, wanted: Mapping[int, bool], part: str | None
    ) -> Iterator[tuple[int, ParsedRow]]:
        start = int(self._groups.starts[group])
        try:
            fields, media = self._tables_of(group, wanted, part)
        except _UNREADABLE as error:
            lost = _lost(group, error)
            yield from ((number, lost) for number in wanted)
            return
        values = _values_at(fields, [number - start for number in wanted])
        for at, (number, with_media) in enumerate(wanted.items()):
            try:
                found = values[at] if values is not None else _value_at(fields, number - start)
                row = self._row(found, media, number - start, with_media=with_media)
            except _UNREADABLE as error:
                row = _lost(group, error)
            if part is not None:
                row = replace(row, fields="{}", media=[item for item in row.media if item.part == part])
            yield number, row

    def _tables_of(
        self, group: int, wanted: Mapping[int, bool], part: str | None
    ) -> tuple[pa.Table | None, pa.Table | None]:
        """Return the columns of fields and those of media, as far as they are needed."""
        names = self.columns
        is_in_media = part is not None and part.rpartition("/")[0] in names.media
        fields = self._read(group, names.fields) if names.fields and not is_in_media else None
        needs_media = any(wanted.values()) and (part is None or is_in_media)
        return fields, self._read(group, names.media) if names.media and needs_media else None

    def _row(self, values: dict[str, Any], media: pa.Table | None, at: int, *, with_media: bool) -> ParsedRow:
        found: list[MediaValue] = []
        if with_media:
            for name, column in zip(media.column_names, media.columns, strict=True) if media is not None else ():
                found += media_of(name, cell_of(column, at), is_optional=name in self.columns.optional)
            for name in CHAT_NAMES:
                found += media_of_chat(name, values.get(name))
        checked, reason = fields_json(without_data(values))
        return ParsedRow(fields=checked, media=list(map(self._placed, found)), reason=reason)

    def _placed(self, found: MediaValue) -> MediaValue:
        """Return a medium with its place in the file instead of its bytes, if they are a part of the file."""
        if not found.data:
            return found
        at = self._groups.offset_in_file(pa.py_buffer(found.data).address)
        return found if at is None else replace(found, data=None, place=(at, len(found.data)))

    def _read(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        key = (self.file, group, columns)
        with self._lock:
            table = self._tables.get(key)
            if table is None:
                table = self._groups.read(group, columns, MAX_GROUP_BYTES)
                if self._groups.nbytes(group, columns):
                    self._tables.put(key, table, table.nbytes)
            return table

    def _check_groups(self) -> None:
        names = self.columns.media + self.columns.fields
        for group in range(len(self._groups.starts) - 1):
            nbytes = self._groups.nbytes(group, names)
            if nbytes > MAX_GROUP_BYTES:
                raise DatasetError(
                    f"{self.file.path}: row group {group} has {nbytes} bytes; wanted at most "
                    f"{MAX_GROUP_BYTES}, since a group is read as a whole: write the file with fewer rows per group "
                    "(row_group_size=100)"
                )


def _values_at(fields: pa.Table | None, rows: Sequence[int]) -> list[dict[str, Any]] | None:
    """Return the values of some rows at once: of many, seven times as fast as one after another. None if they are few,
    or if one of them cannot be read."""
    if fields is None:
        return [{} for _ in rows]
    if len(rows) < _FEW_ROWS:
        return None
    try:
        return fields.take(pa.array(rows, pa.int64())).to_pylist()
    except _UNREADABLE:
        return None


def _value_at(fields: pa.Table | None, row: int) -> dict[str, Any]:
    return {} if fields is None else {name: fields.column(name)[row].as_py() for name in fields.column_names}


def _lost(group: int, error: Exception) -> ParsedRow:
    return ParsedRow(reason=f"row group {group} cannot be read: {error}", is_lost=True)
