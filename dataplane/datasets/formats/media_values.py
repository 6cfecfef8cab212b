"""Reads the media of a table cell or of a JSON value: bytes, a path, or the reason why there is neither. Pure
functions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CHAT_NAMES = ("messages", "prompt", "conversations")
"""The keys whose values may be chat turns with media among their contents."""


@dataclass(frozen=True, slots=True)
class MediaValue:
    """One medium in the form that its row gives: exactly one of data, path and reason is set."""

    part: str
    data: bytes | memoryview | None = None
    path: str | None = None
    reason: str | None = None


def media_of(column: str, value: Any, *, is_optional: bool = False) -> list[MediaValue]:
    """Return the media of one cell; the part of each is `column/place`. A null cell has no media if `is_optional`,
    otherwise it is a fault."""
    if value is None and is_optional:
        return []
    values = value if isinstance(value, (list, tuple)) else [value]
    return [_found(f"{column}/{at}", item) for at, item in enumerate(values)]


def media_of_chat(column: str, turns: Any) -> list[MediaValue]:
    """Return the media that chat turns name by path: `{"type": "image", "image": "a.png"}` among a turn's contents."""
    return [_found(f"{column}/{at}", value) for at, value in enumerate(_chat_values(turns))]


def _chat_values(turns: Any) -> Iterator[Any]:
    for turn in turns if isinstance(turns, list) else []:
        contents = turn.get("content") if isinstance(turn, Mapping) else None
        for content in contents if isinstance(contents, list) else []:
            kind = content.get("type") if isinstance(content, Mapping) else None
            if kind in ("image", "video") and content.get(kind) is not None:
                yield content[kind]


def _found(part: str, value: Any) -> MediaValue:
    if isinstance(value, Mapping):
        return _found_in_mapping(part, value)
    if isinstance(value, (bytes, memoryview)):
        return MediaValue(part, data=value)
    if isinstance(value, str):
        return MediaValue(part, path=value) if value else MediaValue(part, reason="an empty path")
    if value is None:
        return MediaValue(part, reason="null; say #optional=COLUMN in the root where samples may lack their one medium")
    return MediaValue(
        part, reason=f"{type(value).__name__} {str(value)[:40]!r}; wanted a path, bytes, or bytes and path"
    )


def _found_in_mapping(part: str, value: Mapping[str, Any]) -> MediaValue:
    data = value.get("bytes")
    if isinstance(data, (bytes, memoryview)):
        return MediaValue(part, data=data)
    if data is not None:
        return MediaValue(
            part, reason=f"bytes is a JSON {type(data).__name__}; JSON holds no bytes: write a file, name its path"
        )
    for key in ("path", "image", "video"):
        if isinstance(value.get(key), str) and value[key]:
            return MediaValue(part, path=value[key])
    return MediaValue(part, reason=f"neither bytes nor a path among {sorted(map(str, value))[:8]}")
