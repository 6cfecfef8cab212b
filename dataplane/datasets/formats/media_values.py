"""Reads the media of a table cell or of a JSON value: bytes, a path, or the reason why there is neither. Pure
functions."""

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dataplane.media.kinds import PART_KINDS

CHAT_NAMES = ("messages", "prompt", "conversations")
"""The keys whose values may be chat turns with media among their contents."""
DATA = "data:"


@dataclass(frozen=True, slots=True)
class MediaValue:
    """One medium in the form that its row gives: exactly one of data, path, reason and place is set."""

    part: str
    data: bytes | memoryview | None = None
    path: str | None = None
    reason: str | None = None
    place: tuple[int, int] | None = None
    """Where the bytes are in the file that has the row: their offset and their number."""


def media_of(column: str, value: Any, *, is_optional: bool = False) -> list[MediaValue]:
    """Return the media of one cell; the part of each is `column/place`. A null cell has no media if `is_optional`,
    otherwise it is a fault."""
    if value is None and is_optional:
        return []
    values = value if isinstance(value, (list, tuple)) else [value]
    return [_found(f"{column}/{at}", item) for at, item in enumerate(values)]


def media_of_chat(column: str, turns: Any) -> list[MediaValue]:
    """Return the media that chat turns name among their contents, as transformers or OpenAI write them:
    `{"type": "image", "image": "a.png"}`, or `{"type": "image_url", "image_url": {"url": "a.png"}}`."""
    values = (value for part in _chat_parts(turns) if (value := _chat_value(part)) is not None)
    return [_found(f"{column}/{at}", value) for at, value in enumerate(values)]


def without_data(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields without the media that chat turns hold as `data:` URLs: only their places are left. Bytes of media
    never travel with fields."""
    return {name: _bare(value) if name in CHAT_NAMES else value for name, value in fields.items()}


def _bare(turns: Any) -> Any:
    if not any(_holds_data(part) for part in _chat_parts(turns)):
        return turns
    return [
        {**turn, "content": [_place_of(part) if _holds_data(part) else part for part in turn["content"]]}
        if isinstance(turn, Mapping) and isinstance(turn.get("content"), list)
        else turn
        for turn in turns
    ]


def _holds_data(part: Any) -> bool:
    value = _chat_value(part)
    return isinstance(value, str) and value.startswith(DATA)


def _place_of(part: Mapping[str, Any]) -> dict[str, str]:
    return {"type": PART_KINDS[part["type"]]}


def _chat_parts(turns: Any) -> Iterator[Any]:
    for turn in turns if isinstance(turns, list) else []:
        contents = turn.get("content") if isinstance(turn, Mapping) else None
        yield from contents if isinstance(contents, list) else []


def _chat_value(part: Any) -> Any:
    """Return what a part of a turn says of a medium; None if it says nothing."""
    kind = PART_KINDS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    if kind is None:
        return None
    named = [part[key] for key in (kind, f"{kind}_url") if part.get(key) is not None]
    value = named[0] if named else None
    return value.get("url") if isinstance(value, Mapping) and "url" in value else value


def _found(part: str, value: Any) -> MediaValue:
    if isinstance(value, Mapping):
        return _found_in_mapping(part, value)
    if isinstance(value, (bytes, memoryview)):
        return MediaValue(part, data=value)
    if isinstance(value, str):
        return _found_in_text(part, value)
    if value is None:
        return MediaValue(part, reason="null; say #optional=COLUMN in the root where samples may lack their one medium")
    return MediaValue(
        part, reason=f"{type(value).__name__} {str(value)[:40]!r}; wanted a path, bytes, or bytes and path"
    )


def _found_in_text(part: str, value: str) -> MediaValue:
    if not value:
        return MediaValue(part, reason="an empty path")
    if not value.startswith(DATA):
        return MediaValue(part, path=value.removeprefix("file://"))
    head, comma, data = value.partition(",")
    if not comma or not head.endswith(";base64"):
        return MediaValue(part, reason=f"{head[:40]!r} is no data: URL in base64")
    try:
        return MediaValue(part, data=base64.b64decode(data, validate=True))
    except ValueError as error:
        return MediaValue(part, reason=f"a data: URL that is not in base64: {error}")


def _found_in_mapping(part: str, value: Mapping[str, Any]) -> MediaValue:
    data = value.get("bytes")
    if isinstance(data, (bytes, memoryview)):
        return MediaValue(part, data=data)
    if data is not None:
        return MediaValue(
            part, reason=f"bytes is a JSON {type(data).__name__}; JSON holds no bytes: write a file, name its path"
        )
    for key in ("path", "image", "video", "url"):
        if isinstance(value.get(key), str) and value[key]:
            return _found_in_text(part, value[key])
    return MediaValue(part, reason=f"neither bytes nor a path among {sorted(map(str, value))[:8]}")
