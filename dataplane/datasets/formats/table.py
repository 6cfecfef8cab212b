"""Tables as shards: rows in groups, where some columns are media and the others are fields.

A group is the rows that are read at once (a row group of Parquet, a record batch of Arrow); a class with the Protocol
`Groups` reads it. Media get their digests while their group is in memory. They are kept for a while, because they are
mostly decoded next.
"""

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.caches import Caches
from dataplane.datasets.formats.cells import cell_of
from dataplane.datasets.formats.columns import ColumnOptions, split_columns
from dataplane.datasets.formats.json_safe import checked_fields
from dataplane.datasets.formats.media_cell import Cell, CellSource
from dataplane.datasets.formats.media_paths import MediaFolders
from dataplane.datasets.formats.media_values import CHAT_NAMES, MediaValue, media_of, media_of_chat, without_data
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.row_media import media_and_flaws, name_cell
from dataplane.datasets.formats.shard import MAX_MEDIUM_BYTES, Flaw, MediumLocation, Row

MAX_GROUP_BYTES = 512 << 20
"""The maximum of uncompressed bytes of one group. A node holds one group at a time per shard."""


class Groups(Protocol):
    """A file of rows that are read in groups."""

    @property
    def file(self) -> RangeFile: ...

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
        """Return the file offset of the bytes at a memory address; None if they are not mapped from the file."""
        ...


class TableShard:
    """One table as a shard. Thread-safe."""

    def __init__(self, groups: Groups, folders: MediaFolders, options: ColumnOptions, caches: Caches) -> None:
        self._groups = groups
        self._folders = folders
        self._caches = caches
        self._columns = split_columns(groups.schema, options, groups.file.path)
        self._lock = threading.Lock()
        self._check_groups()

    @property
    def num_samples(self) -> int:
        """The number of rows of the table."""
        return int(self._groups.starts[-1])

    @property
    def flaws(self) -> Sequence[Flaw]:
        """The parts of the file that cannot be read."""
        return self._groups.flaws

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns that are read, sorted."""
        return tuple(sorted(self._columns.media + self._columns.fields))

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows with these numbers. Each group is read once, whatever the order of the numbers."""
        self._groups.file.check_unchanged()
        by_group: dict[int, list[int]] = defaultdict(list)
        for number in numbers:
            by_group[self._group_of(number)].append(number)
        rows: dict[int, Row] = {}
        for group, members in by_group.items():
            rows |= self._rows_of_group(group, members)
        return [rows[number] for number in numbers]

    def locate(self, offset: int, part: str, nbytes: int) -> MediumLocation | None:
        """Return the place of the medium at `part` of a row. The row is read for this, unless it was read lately."""
        if not 0 <= offset < self.num_samples:
            return None
        cells = self._caches.rows.get((self._groups.file, offset))
        if cells is None:
            self.rows([offset])
            cells = self._caches.rows.get((self._groups.file, offset)) or ()
        for cell in cells:
            if (cell.part, cell.nbytes) == (part, nbytes) and not cell.reason:
                return self._place(offset, cell)
        return None

    def read_cell(self, row: int, part: str) -> bytes:
        """Return the bytes of one medium. Raises DatasetError if they cannot be read."""
        self._groups.file.check_unchanged()
        group = self._group_of(row)
        start = int(self._groups.starts[group])
        column = part.rpartition("/")[0]
        try:
            is_media = column in self._columns.media
            table = self._read(group, self._columns.media if is_media else self._columns.fields)
            read = media_of if is_media else media_of_chat
            found = {item.part: item.data for item in read(column, cell_of(table.column(column), row - start))}
            data = None if found.get(part) is None else bytes(memoryview(found[part] or b""))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DatasetError(f"{self._groups.file.path}: row group {group} cannot be read: {error}") from error
        if data is None:
            raise DatasetError(f"{self._groups.file.path} has no bytes at row {row}, {part}; ingest the dataset again")
        return data

    def _group_of(self, row: int) -> int:
        return int(np.searchsorted(self._groups.starts, row, side="right")) - 1

    def _place(self, row: int, cell: Cell) -> MediumLocation:
        key = f"{row_key(row)} {cell.part}"
        if cell.file is not None:
            return MediumLocation(cell.file, cell.offset, cell.nbytes, key, cell.formats)
        return MediumLocation(CellSource(self, self._groups.file.path, row, cell.part), 0, cell.nbytes, key, ())

    def _rows_of_group(self, group: int, numbers: Sequence[int]) -> dict[int, Row]:
        start = int(self._groups.starts[group])
        try:
            fields = self._read(group, self._columns.fields) if self._columns.fields else None
            known = {number: self._caches.rows.get((self._groups.file, number)) for number in numbers}
            has_paths = any(cell.is_path for cells in known.values() for cell in cells or ())
            is_needed = self._columns.media and (has_paths or None in known.values())
            media = self._read(group, self._columns.media) if is_needed else None
            return {
                number: self._row(number, _cells_at(fields, number - start), media, number - start, known[number])
                for number in numbers
            }
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError also means text that is not UTF-8
            reason = f"row group {group} cannot be read: {error}"
            return {
                number: Row(row_key(number), {}, (), (Flaw(number, row_key(number), reason),)) for number in numbers
            }

    def _row(
        self, number: int, values: Mapping[str, Any], media: pa.Table | None, at: int, known: tuple[Cell, ...] | None
    ) -> Row:
        key = row_key(number)
        if known is None or any(cell.is_path for cell in known):
            found: list[MediaValue] = []
            if media is not None:
                for name in self._columns.media:
                    is_optional = name in self._columns.optional
                    found += media_of(name, cell_of(media.column(name), at), is_optional=is_optional)
            for name in CHAT_NAMES:
                found += media_of_chat(name, values.get(name))
            known = self._name(number, found)
        served, flaws = media_and_flaws(number, key, known)
        fields, reason = checked_fields(without_data(values))
        return Row(key, fields, served, (*flaws, Flaw(number, key, reason)) if reason else flaws)

    def _name(self, number: int, found: Sequence[MediaValue]) -> tuple[Cell, ...]:
        cells = tuple(self._name_one(number, item) for item in found)
        self._caches.rows.put((self._groups.file, number), cells)
        return cells

    def _name_one(self, number: int, found: MediaValue) -> Cell:
        at = self._groups.offset_in_file(pa.py_buffer(found.data).address) if found.data else None
        if at is not None:
            nbytes = len(found.data or b"")
            if nbytes <= MAX_MEDIUM_BYTES:
                found = replace(found, data=self._groups.file.read(at, nbytes))
            if len(found.data or b"") != nbytes:
                raise DatasetError(f"{self._groups.file.path} was cut while it was read")
            return replace(name_cell(found, self._folders, self._caches), file=self._groups.file, offset=at)
        return name_cell(found, self._folders, self._caches)

    def _read(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        key = (self._groups.file, group, columns)
        with self._lock:
            table = self._caches.groups.get(key)
            if table is None:
                table = self._groups.read(group, columns, MAX_GROUP_BYTES)
                if self._groups.nbytes(group, columns):
                    self._caches.groups.put(key, table, table.nbytes)
            return table

    def _check_groups(self) -> None:
        names = self._columns.media + self._columns.fields
        for group in range(len(self._groups.starts) - 1):
            nbytes = self._groups.nbytes(group, names)
            if nbytes > MAX_GROUP_BYTES:
                raise DatasetError(
                    f"{self._groups.file.path}: row group {group} has {nbytes} bytes; wanted at most "
                    f"{MAX_GROUP_BYTES}, since a group is read as a whole: write the file with fewer rows per group "
                    "(row_group_size=100)"
                )


def row_key(row: int) -> str:
    """Return the text that names a row in messages: `row 3`."""
    return f"row {row}"


def _cells_at(table: pa.Table | None, at: int) -> dict[str, Any]:
    return {} if table is None else {name: table.column(name)[at].as_py() for name in table.column_names}
