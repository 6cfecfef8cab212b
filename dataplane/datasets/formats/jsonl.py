"""JSON lines as a shard: one object per line. A line names its media by path, under image, images, video or videos, or
in chat turns.

Indexing finds where lines begin. A line is parsed when a call reads its sample. Empty lines are not rows.
"""

import json
from array import array
from collections.abc import Sequence
from typing import Any

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.caches import Caches
from dataplane.datasets.formats.columns import MEDIA_NAMES, ColumnOptions
from dataplane.datasets.formats.media_cell import Cell
from dataplane.datasets.formats.media_paths import MediaFolders
from dataplane.datasets.formats.media_values import CHAT_NAMES, MediaValue, media_of, media_of_chat
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.row_media import media_and_flaws, name_cell
from dataplane.datasets.formats.shard import MAX_FIELDS_BYTES, Flaw, MediumLocation, Row
from dataplane.datasets.formats.table import checked_fields

SCAN_BYTES = 4 << 20


class JsonLinesShard:
    """One file of JSON lines. Thread-safe."""

    columns = None
    flaws: Sequence[Flaw] = ()

    def __init__(self, file: RangeFile, folders: MediaFolders, options: ColumnOptions, caches: Caches) -> None:
        self._file = file
        self._folders = folders
        self._names = [name for name in (*MEDIA_NAMES, *sorted(options.media)) if name not in options.drop]
        self._options = options
        self._caches = caches
        self._starts, self._ends, self._lines = _find_lines(file)
        head = file.read(self._starts[0], 1) if self._starts else b""
        if head == b"[":
            raise DatasetError(f"{file.path} is a JSON array; wanted one object a line: jq -c '.[]' makes them")

    @property
    def num_samples(self) -> int:
        """The number of lines that are not empty."""
        return len(self._starts)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows with these numbers."""
        self._file.check_unchanged()
        return [self._row(number) for number in numbers]

    def locate(self, offset: int, part: str, nbytes: int) -> MediumLocation | None:
        """Return the file that line number `offset` names at `part`."""
        if not 0 <= offset < self.num_samples:
            return None
        self._file.check_unchanged()
        values, _ = self._parse(offset)
        for cell in self._cells([item for item in self._found(values) if item.part == part]):
            if cell.file is not None and cell.nbytes == nbytes:
                return MediumLocation(cell.file, 0, nbytes, f"{self._key(offset)} {part}", cell.formats)
        return None

    def _row(self, number: int) -> Row:
        key = self._key(number)
        values, reason = self._parse(number)
        media, flaws = media_and_flaws(number, key, self._cells(self._found(values)))
        kept = {name: value for name, value in values.items() if name not in {*self._names, *self._options.drop}}
        fields, field_reason = checked_fields(kept)
        reason = reason or field_reason
        return Row(key, fields, media, (*flaws, Flaw(number, key, reason)) if reason else flaws)

    def _key(self, number: int) -> str:
        return f"line {self._lines[number]}"

    def _parse(self, number: int) -> tuple[dict[str, Any], str]:
        start, end = self._starts[number], self._ends[number]
        where = f"line {self._lines[number]} of {self._file.path}"
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


def _find_lines(file: RangeFile) -> "tuple[array[int], array[int], Sequence[int]]":
    """Return the start and end offset of every line that is not empty, and its number from 1."""
    starts, ends, lines = array("q"), array("q"), array("q")
    begin, at, line, has_text = 0, 0, 1, False
    while at < file.nbytes:
        block = file.read(at, SCAN_BYTES)
        if not block:
            raise DatasetError(
                f"{file.path} ended at {at} of {file.nbytes} bytes while it was indexed; ingest it again"
            )
        place = 0
        while True:
            newline = block.find(b"\n", place)
            part = block[place:newline] if newline >= 0 else block[place:]
            has_text = has_text or bool(part.strip())
            if newline < 0:
                break
            if has_text:
                starts.append(begin)
                ends.append(at + newline)
                lines.append(line)
            begin, line, has_text, place = at + newline + 1, line + 1, False, newline + 1
        at += len(block)
    if has_text:
        starts.append(begin)
        ends.append(file.nbytes)
        lines.append(line)
    is_plain = not lines or lines[-1] == len(lines)
    return starts, ends, range(1, len(lines) + 1) if is_plain else lines
