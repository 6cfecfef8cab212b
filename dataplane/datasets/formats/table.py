"""Tables as shards: rows whose columns are media and fields. A parser reads the rows (`table_rows.py`).

Media get their digests as soon as their row arrives. Digests and places of the last rows are kept, because media are
mostly decoded next.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.caches import Caches
from dataplane.datasets.formats.columns import ColumnOptions
from dataplane.datasets.formats.media_cell import Cell, CellSource
from dataplane.datasets.formats.media_paths import MediaFolders
from dataplane.datasets.formats.parsed_rows import ReceivedRow, cost_of, rows_of
from dataplane.datasets.formats.parser import READING, Parser, Reply, ask, json_of, opening, wrong_reply
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.row_media import media_and_flaws, name_cell
from dataplane.datasets.formats.shard import Flaw, MediumLocation, Row

Found = TypeVar("Found")


class TableShard:
    """One table as a shard. Thread-safe. Raises DatasetError if it cannot be opened."""

    def __init__(
        self,
        file: RangeFile,
        form: str,
        folders: MediaFolders,
        options: ColumnOptions,
        caches: Caches,
        parser: Parser,
    ) -> None:
        """`form`: `parquet` or `arrow`."""
        self._file = file
        self._read_as = (file, options)  # the same file may be read in other ways too
        self._folders = folders
        self._caches = caches
        self._parser = parser
        self._table = {"form": form, "options": options.to_dict()}
        self._open()

    @property
    def num_samples(self) -> int:
        """The number of rows of the table."""
        return self._num_rows

    @property
    def flaws(self) -> Sequence[Flaw]:
        """The parts of the file that cannot be read."""
        return self._flaws

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns that are read, sorted."""
        return self._columns

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows with these numbers."""
        self._file.check_unchanged()
        known = {number: self._known(number) for number in numbers}
        rows: dict[int, Row] = {}
        wanted: dict[int, bool] = {}
        for number, cells in known.items():
            kept = self._caches.fields.get((self._read_as, number)) if cells is not None else None
            if kept is None:
                wanted[number] = cells is None
            else:
                rows[number] = self._row(number, kept, cells)

        def take(reply: Reply) -> None:
            found = rows_of(self._file, reply)
            cost = cost_of(reply, found)
            for number, parsed in found:
                if number in wanted:
                    rows[number] = self._row(number, parsed, known[number])
                    if not parsed.is_lost:
                        self._caches.fields.put((self._read_as, number), parsed.without_media(), cost)

        if wanted:
            self._read(wanted, None, take)
        return [self._found(rows, number) for number in numbers]

    def locate(self, offset: int, part: str, nbytes: int) -> MediumLocation | None:
        """Return the place of the medium at `part` of a row. The row is read for this, unless it was read lately."""
        if not 0 <= offset < self.num_samples:
            return None
        cells = self._caches.rows.get((self._read_as, offset))
        if cells is None:
            self.rows([offset])
            cells = self._caches.rows.get((self._read_as, offset)) or ()
        for cell in cells:
            if (cell.part, cell.nbytes) == (part, nbytes) and not cell.reason:
                return self._place(offset, cell)
        return None

    def read_cell(self, row: int, part: str) -> bytes:
        """Return the bytes of one medium. Raises DatasetError if they cannot be read."""
        self._file.check_unchanged()
        found: dict[int, ReceivedRow] = {}

        def take(reply: Reply) -> None:
            found.update(rows_of(self._file, reply))

        self._read({row: True}, part, take)
        parsed = self._found(found, row)
        if parsed.is_lost:
            raise DatasetError(f"{self._file.path}: {parsed.reason}")
        for item in parsed.media:
            if item.part == part and item.data is not None:
                return bytes(item.data)
        raise DatasetError(f"{self._file.path} has no bytes at row {row}, {part}; ingest the dataset again")

    def _open(self) -> None:
        reply = ask(self._parser, "table", self._file, self._table, opening(self._file))
        head = json_of(self._file, reply)
        try:
            self._num_rows = int(head["num_rows"])
            self._columns = tuple(map(str, head["columns"]))
            self._flaws = [Flaw(int(row), str(key), str(reason)) for row, key, reason in head["flaws"]]
        except (KeyError, TypeError, ValueError) as error:
            raise wrong_reply(self._file, f"a table: {error}") from error
        if self._num_rows < 0:
            raise wrong_reply(self._file, f"{self._num_rows} rows")

    def _known(self, number: int) -> tuple[Cell, ...] | None:
        """Return the media of a row if they have names already. A file that a row names may have changed since."""
        cells = self._caches.rows.get((self._read_as, number))
        return None if cells is None or any(cell.is_path for cell in cells) else cells

    def _read(self, wanted: Mapping[int, bool], part: str | None, take: Callable[[Reply], None]) -> None:
        rows = list(wanted.items())
        self._parser.call("table rows", self._file, {**self._table, "rows": rows, "part": part}, take, READING)

    def _found(self, rows: Mapping[int, Found], number: int) -> Found:
        if number not in rows:
            raise wrong_reply(self._file, f"no row {number}")
        return rows[number]

    def _row(self, number: int, parsed: ReceivedRow, known: tuple[Cell, ...] | None) -> Row:
        key = row_key(number)
        if parsed.is_lost:
            return Row(key, {}, (), (Flaw(number, key, parsed.reason),))
        if known is None:
            known = tuple(name_cell(item, self._file, self._folders, self._caches) for item in parsed.media)
            self._caches.rows.put((self._read_as, number), known)
        served, flaws = media_and_flaws(number, key, known)
        return Row(key, parsed.fields, served, (*flaws, Flaw(number, key, parsed.reason)) if parsed.reason else flaws)

    def _place(self, row: int, cell: Cell) -> MediumLocation:
        key = f"{row_key(row)} {cell.part}"
        if cell.file is not None:
            return MediumLocation(cell.file, cell.offset, cell.nbytes, key, cell.formats)
        return MediumLocation(CellSource(self, self._file.path, row, cell.part), 0, cell.nbytes, key, ())


def row_key(row: int) -> str:
    """Return the text that names a row in messages: `row 3`."""
    return f"row {row}"
