"""JSON as a shard: one object per line, or an array of objects. An object names its media by path, or holds them as
`data:` URLs, under image, images, video or videos, or in chat turns.

A parser finds where the objects are (`json_items.py`), and parses one when a call reads its sample (`json_rows.py`).
"""

from collections.abc import Callable, Sequence

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.caches import Caches
from dataplane.datasets.formats.columns import MEDIA_NAMES, ColumnOptions
from dataplane.datasets.formats.json_items import items_of
from dataplane.datasets.formats.media_cell import Cell, CellSource
from dataplane.datasets.formats.media_paths import MediaFolders
from dataplane.datasets.formats.media_values import MediaValue
from dataplane.datasets.formats.parsed_rows import ReceivedRow, cost_of, rows_of
from dataplane.datasets.formats.parser import READING, Parser, Reply, ask, opening, wrong_reply
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.row_media import media_and_flaws, name_cell
from dataplane.datasets.formats.shard import Flaw, MediumLocation, Row


class JsonShard:
    """One file of JSON lines, or of a JSON array. Thread-safe."""

    columns = None
    flaws: Sequence[Flaw] = ()

    def __init__(
        self, file: RangeFile, folders: MediaFolders, options: ColumnOptions, caches: Caches, parser: Parser
    ) -> None:
        self._file = file
        self._read_as = (file, options)  # the same file may be read in other ways too
        self._folders = folders
        self._caches = caches
        self._parser = parser
        names = [name for name in (*MEDIA_NAMES, *sorted(options.media)) if name not in options.drop]
        self._names = {
            "media": names,
            "optional": ["images", "videos", *options.optional],
            "drop": sorted(options.drop),
        }
        self._items = items_of(file, ask(parser, "json items", file, {}, opening(file)))

    @property
    def num_samples(self) -> int:
        """The number of objects."""
        return len(self._items.starts)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows with these numbers."""
        self._file.check_unchanged()
        rows: dict[int, Row] = {}

        wanted: list[int] = []
        for number in dict.fromkeys(numbers):
            key = (self._read_as, number)
            media, kept = self._caches.objects.get(key), self._caches.fields.get(key)
            if media is None or kept is None:
                wanted.append(number)
            else:
                rows[number] = self._row(number, kept, media)

        def take(reply: Reply) -> None:
            found = rows_of(self._file, reply)
            cost = cost_of(reply, found)
            for number, parsed in found:
                if 0 <= number < self.num_samples:
                    rows[number] = self._row(number, parsed, parsed.media)
                    self._caches.fields.put((self._read_as, number), parsed.without_media(), cost)

        if wanted:
            self._parse(wanted, None, take)
        missing = [number for number in numbers if number not in rows]
        if missing:
            raise wrong_reply(self._file, f"no {self._key(missing[0])}")
        return [rows[number] for number in numbers]

    def locate(self, offset: int, part: str, nbytes: int) -> MediumLocation | None:
        """Return the file that object number `offset` names at `part`, or the object itself if it holds the bytes."""
        if not 0 <= offset < self.num_samples:
            return None
        self._file.check_unchanged()
        found = self._caches.objects.get((self._read_as, offset))
        if found is None:
            self.rows([offset])
            found = self._caches.objects.get((self._read_as, offset)) or ()
        for item in found:
            cell = self._cell(item) if item.part == part else None
            if cell is not None and not cell.reason and cell.nbytes == nbytes:
                source = cell.file or CellSource(self, self._file.path, offset, part)
                return MediumLocation(source, 0, nbytes, f"{self._key(offset)} {part}", cell.formats)
        return None

    def read_cell(self, row: int, part: str) -> bytes:
        """Return the bytes of a medium that an object holds. Raises DatasetError if it holds none there."""
        self._file.check_unchanged()
        found: list[bytes] = []

        def take(reply: Reply) -> None:
            for _, parsed in rows_of(self._file, reply):
                found.extend(bytes(item.data) for item in parsed.media if item.part == part and item.data is not None)

        self._parse([row], part, take)
        if not found:
            raise DatasetError(f"{self._file.path} has no bytes at {self._key(row)}, {part}; ingest the dataset again")
        return found[0]

    def _parse(self, numbers: Sequence[int], part: str | None, take: Callable[[Reply], None]) -> None:
        items = [
            (number, int(self._items.starts[number]), int(self._items.ends[number]), self._key(number))
            for number in numbers
        ]
        self._parser.call("json rows", self._file, {"items": items, "names": self._names, "part": part}, take, READING)

    def _row(self, number: int, parsed: ReceivedRow, found: Sequence[MediaValue | Cell]) -> Row:
        key = self._key(number)
        cells = [self._cell(item) for item in found]
        # a file that is named by path may change although the object does not
        known = tuple(
            item if isinstance(item, MediaValue) and item.path is not None else cell
            for item, cell in zip(found, cells, strict=True)
        )
        self._caches.objects.put((self._read_as, number), known)
        media, flaws = media_and_flaws(number, key, cells)
        return Row(key, parsed.fields, media, (*flaws, Flaw(number, key, parsed.reason)) if parsed.reason else flaws)

    def _key(self, number: int) -> str:
        return f"{self._items.noun} {self._items.numbers[number]}"

    def _cell(self, found: MediaValue | Cell) -> Cell:
        if isinstance(found, Cell):
            return found
        return name_cell(found, self._file, self._folders, self._caches)
