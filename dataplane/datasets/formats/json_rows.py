"""Parses the objects of JSON files: fields, and media as paths or as bytes (`data:` URLs)."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dataplane.datasets.formats.json_safe import fields_json
from dataplane.datasets.formats.media_values import CHAT_NAMES, MediaValue, media_of, media_of_chat, without_data
from dataplane.datasets.formats.parsed_rows import ParsedRow
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import MAX_FIELDS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonNames:
    """What the names in an object mean."""

    media: Sequence[str]
    """The names that hold media."""
    optional: Sequence[str]
    """Those of them that may be null."""
    drop: Sequence[str]
    """The names that are not read."""


def parse_objects(
    file: RangeFile, items: Sequence[tuple[int, int, int, str]], names: JsonNames, part: str | None
) -> Iterator[tuple[int, ParsedRow]]:
    """Yield the rows of some objects. `items`: the number, the offsets of begin and end, and the key of each. With
    `part`, a row has this medium and nothing else."""
    for number, start, end, key in items:
        values, reason = _parse(file, start, end, key)
        media = _media_of(values, names)
        if part is not None:
            yield number, ParsedRow(media=[item for item in media if item.part == part])
            continue
        kept = {name: value for name, value in values.items() if name not in names.media and name not in names.drop}
        fields, field_reason = fields_json(without_data(kept))
        yield number, ParsedRow(fields=fields, media=media, reason=reason or field_reason)


def _parse(file: RangeFile, start: int, end: int, key: str) -> tuple[dict[str, Any], str]:
    where = f"{key} of {file.path}"
    if end - start > MAX_FIELDS_BYTES:
        return {}, f"{where} has {end - start} bytes; wanted at most {MAX_FIELDS_BYTES}"
    try:
        values = json.loads(file.read(start, end - start))
    except (ValueError, RecursionError) as error:
        return {}, f"{where} is not JSON: {error}"
    if not isinstance(values, dict):
        return {}, f"{where} holds a JSON {type(values).__name__}; wanted an object"
    return values, ""


def _media_of(values: dict[str, Any], names: JsonNames) -> list[MediaValue]:
    found: list[MediaValue] = []
    for name in names.media:
        if name in values:
            found += media_of(name, values[name], is_optional=name in names.optional)
    for name in CHAT_NAMES:
        found += media_of_chat(name, values.get(name))
    return found
