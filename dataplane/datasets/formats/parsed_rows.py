"""Rows on their way from a parser to the node: fields as JSON, media as paths, places in the file, or bytes."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataplane.datasets.formats.media_values import MediaValue
from dataplane.datasets.formats.parser import Reply, json_of, wrong_reply
from dataplane.datasets.formats.range_files import RangeFile

REPLY_BYTES = 1 << 20
"""A reply is sent as soon as its rows take as many bytes."""
MAX_ROW_CHARS = 128 << 20
MAX_ROW_MEDIA = 10_000
"""The most media of one row."""
_PLAIN = '"",false,[]]'
_to_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRow:
    """One row as its file has it. Its media have no digests yet."""

    fields: str = "{}"
    """The fields as a JSON object."""
    media: Sequence[MediaValue] = ()
    """Empty too where the node did not ask for media."""
    reason: str = ""
    """What is wrong with the row or its fields, or an empty string."""
    is_lost: bool = False
    """True if the row cannot be read at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRow:
    """A `ParsedRow` in the node: its fields are values."""

    fields: dict[str, Any] = field(default_factory=dict)
    media: Sequence[MediaValue] = ()
    reason: str = ""
    is_lost: bool = False

    def without_media(self) -> "ReceivedRow":
        """Return the row without its media."""
        return ReceivedRow(fields=self.fields, reason=self.reason, is_lost=self.is_lost) if self.media else self


def replies_of(rows: Iterable[tuple[int, ParsedRow]]) -> Iterator[Reply]:
    """Yield numbered rows as replies of about `REPLY_BYTES`."""
    texts: list[str] = []
    buffers: list[bytes | memoryview] = []
    nbytes = 0
    for number, row in rows:
        before = len(buffers)
        text = _text_of(number, row, buffers)
        nbytes += len(text) + sum(map(len, buffers[before:]))
        texts.append(text)
        if nbytes >= REPLY_BYTES:
            yield _reply(texts, buffers)
            texts, buffers, nbytes = [], [], 0
    if texts:
        yield _reply(texts, buffers)


def rows_of(file: RangeFile, reply: Reply) -> list[tuple[int, ReceivedRow]]:
    """Return the numbered rows of a reply. Raises DatasetError if it is none."""
    try:
        return [_row_of(file, reply.buffers, *item) for item in json_of(file, reply)]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise wrong_reply(file, f"rows: {error}") from error


def cost_of(reply: Reply, rows: Sequence[tuple[int, ReceivedRow]]) -> int:
    """Return about how many bytes of memory the fields of one of a reply's rows take: values take more than text."""
    return 500 + 4 * len(reply.head) // max(1, len(rows))


def _reply(texts: Sequence[str], buffers: Sequence[bytes | memoryview]) -> Reply:
    return Reply(f"[{','.join(texts)}]".encode(), buffers)


def _text_of(number: int, row: ParsedRow, buffers: list[bytes | memoryview]) -> str:
    if len(row.media) > MAX_ROW_MEDIA:
        row = _unusable(f"{len(row.media)} media; wanted at most {MAX_ROW_MEDIA}")
    media: list[tuple[str, str, Any]] = []
    found: list[bytes | memoryview] = []
    for value in row.media:
        if value.data is not None:
            media.append((value.part, "data", len(buffers) + len(found)))
            found.append(value.data)
        elif value.place is not None:
            media.append((value.part, "place", value.place))
        elif value.path is not None:
            media.append((value.part, "path", value.path))
        else:
            media.append((value.part, "reason", value.reason))
    is_plain = not (row.reason or row.is_lost or media)
    text = f"[{number},{row.fields},{_PLAIN if is_plain else _to_json((row.reason, row.is_lost, media))[1:]}"
    if len(text) > MAX_ROW_CHARS:
        too_long = _unusable(f"{len(text)} characters of fields and paths; wanted at most {MAX_ROW_CHARS}")
        return _text_of(number, too_long, buffers)
    buffers += found
    return text


def _unusable(reason: str) -> ParsedRow:
    return ParsedRow(reason=reason, is_lost=True)


def _row_of(
    file: RangeFile,
    buffers: Sequence[bytes | memoryview],
    number: int,
    fields: dict[str, Any],
    reason: str,
    is_lost: bool,
    media: Sequence[tuple[str, str, Any]],
) -> tuple[int, ReceivedRow]:
    if not (isinstance(number, int) and isinstance(fields, dict) and isinstance(reason, str)):
        raise ValueError(f"{str(number)[:40]}, {type(fields).__name__}, {type(reason).__name__}")
    found = tuple(_medium_of(file, buffers, *item) for item in media)
    return number, ReceivedRow(fields=fields, media=found, reason=reason, is_lost=bool(is_lost))


def _medium_of(file: RangeFile, buffers: Sequence[bytes | memoryview], part: str, kind: str, value: Any) -> MediaValue:
    if kind == "data":
        return MediaValue(str(part), data=buffers[range(len(buffers))[value]])
    if kind == "place":
        offset, nbytes = map(int, value)
        if not 0 <= offset <= offset + nbytes <= file.nbytes:
            raise ValueError(f"a medium of {nbytes} bytes at {offset}, in a file of {file.nbytes}")
        return MediaValue(str(part), place=(offset, nbytes))
    return MediaValue(str(part), path=str(value)) if kind == "path" else MediaValue(str(part), reason=str(value))
