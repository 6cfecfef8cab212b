"""JSON as a shard: one object per line, or an array of objects. An object names its media by path, or holds them as
`data:` URLs, under image, images, video or videos, or in chat turns.

Indexing finds where the objects are (`json_items.py`). One is parsed when a call reads its sample.
"""

import json
from collections.abc import Sequence
from typing import Any

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.caches import Caches
from dataplane.datasets.formats.columns import MEDIA_NAMES, ColumnOptions
from dataplane.datasets.formats.json_items import find_items
from dataplane.datasets.formats.json_safe import checked_fields
from dataplane.datasets.formats.media_cell import Cell, CellSource
from dataplane.datasets.formats.media_paths import MediaFolders
from dataplane.datasets.formats.media_values import CHAT_NAMES, MediaValue, media_of, media_of_chat, without_data
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.row_media import media_and_flaws, name_cell
from dataplane.datasets.formats.shard import MAX_FIELDS_BYTES, Flaw, MediumLocation, Row


class JsonShard:
    """One file of JSON lines, or of a JSON array. Thread-safe."""

    columns = None
    flaws: Sequence[Flaw] = ()

    def __init__(self, file: RangeFile, folders: MediaFolders, options: ColumnOptions, caches: Caches) -> None:
        self._file = file
        self._folders = folders
        self._names = [name for name in (*MEDIA_NAMES, *sorted(options.media)) if name not in options.drop]
        self._options = options
        self._caches = caches
        self._items = find_items(file)

    @property
    def num_samples(self) -> int:
        """The number of objects."""
        return len(self._items.starts)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows with these numbers."""
        self._file.check_unchanged()
        return [self._row(number) for number in numbers]

    def locate(self, offset: int, part: str, nbytes: int) -> MediumLocation | None:
        """Return the file that object number `offset` names at `part`, or the object itself if it holds the bytes."""
        if not 0 <= offset < self.num_samples:
            return None
        for cell in self._cells(self._at(offset, part)):
            if not cell.reason and cell.nbytes == nbytes:
                source = cell.file or CellSource(self, self._file.path, offset, part)
                return MediumLocation(source, 0, nbytes, f"{self._key(offset)} {part}", cell.formats)
        return None

    def read_cell(self, row: int, part: str) -> bytes:
        """Return the bytes of a medium that an object holds. Raises DatasetError if it holds none there."""
        for found in self._at(row, part):
            if found.data is not None:
                return bytes(found.data)
        raise DatasetError(f"{self._file.path} has no bytes at {self._key(row)}, {part}; ingest the dataset again")

    def _at(self, number: int, part: str) -> list[MediaValue]:
        self._file.check_unchanged()
        values, _ = self._parse(number)
        return [item for item in self._found(values) if item.part == part]

    def _row(self, number: int) -> Row:
        key = self._key(number)
        values, reason = self._parse(number)
        media, flaws = media_and_flaws(number, key, self._cells(self._found(values)))
        kept = {name: value for name, value in values.items() if name not in {*self._names, *self._options.drop}}
        fields, field_reason = checked_fields(without_data(kept))
        reason = reason or field_reason
        return Row(key, fields, media, (*flaws, Flaw(number, key, reason)) if reason else flaws)

    def _key(self, number: int) -> str:
        return f"{self._items.noun} {self._items.numbers[number]}"

    def _parse(self, number: int) -> tuple[dict[str, Any], str]:
        start, end = int(self._items.starts[number]), int(self._items.ends[number])
        where = f"{self._key(number)} of {self._file.path}"
        if end - start > MAX_FIELDS_BYTES:
            return {}, f"{where} has {end - start} bytes; wanted at most {MAX_FIELDS_BYTES}"
        try:
            values = json.loads(self._file.read(start, end - start))
        except (ValueError, RecursionError) as error:
            return {}, f"{where} is not JSON: {error}"
        if not isinstance(values, dict):
            return {}, f"{where} holds a JSON {type(values).__name__}; wanted an object"
        return values, ""

    def _found(self, values: dict[str, Any]) -> list[MediaValue]:
        found: list[MediaValue] = []
        for name in self._names:
            if name in values:
                is_optional = name in ("images", "videos") or name in self._options.optional
                found += media_of(name, values[name], is_optional=is_optional)
        for name in CHAT_NAMES:
            found += media_of_chat(name, values.get(name))
        return found

    def _cells(self, found: Sequence[MediaValue]) -> list[Cell]:
        return [name_cell(item, self._folders, self._caches) for item in found]
