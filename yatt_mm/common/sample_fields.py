"""Reads question and answer from a sample's fields, in the forms that data sets use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataplane.media.kinds import MediaKind

PLACEHOLDERS: Mapping[str, MediaKind] = {"<image>": "image", "<video>": "video"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question about a sample's media."""

    text: str
    order: tuple[int, ...]
    """The numbers of the sample's media, in the order of the prompt."""


def take_field(fields: Mapping[str, Any], key: str) -> Any:
    """Return the value at a key; `a.b` looks into nested objects. ValueError says what is there instead."""
    value: Any = fields
    for place, part in enumerate(key.split(".")):
        if not isinstance(value, Mapping) or part not in value:
            above = ".".join(key.split(".")[:place])
            found = sorted(value) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise ValueError(f"the sample lacks {key}; {above or 'it'} has {found}")
        value = value[part]
    return value


def read_answer(value: Any, key: str) -> str:
    """Return an answer as text: text as it is, anything else as JSON (7, true, ["a", "b"]). ValueError for null."""
    if value is None:
        raise ValueError(f"the sample's {key} is null; give it an answer, or leave the sample out")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def with_field(fields: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of the fields with another value at an existing key."""
    part, dot, rest = key.partition(".")
    return {**fields, part: with_field(fields[part], rest, value) if dot else value}


def read_question(value: Any, kinds: Sequence[MediaKind]) -> Question:
    """Return the question of one user turn: text, or verl's and OpenAI's chat turns if there is only one.

    `kinds`: the kinds of the sample's media, from the data plane. The trainer's prompts put all media before the text.
    So placeholders (`<image>`, `<video>`) are removed from the beginning, and give the order. Placeholders at another
    place, or for other media, would mean another prompt, and raise ValueError. So does a question without text
    and without media.
    """
    text, named = (value, []) if isinstance(value, str) else _only_turn(value)
    bare = text.lstrip()
    while bare.startswith(tuple(PLACEHOLDERS)):
        placeholder, _, bare = bare.partition(">")
        named.append(PLACEHOLDERS[f"{placeholder}>"])
        text = bare = bare.lstrip()
    if any(placeholder in text for placeholder in PLACEHOLDERS):
        raise ValueError(
            f"the question {text[:80]!r} has a placeholder in its middle; media come before the text here, so move "
            "it to the beginning, or remove it"
        )
    if named and sorted(named) != sorted(kinds):
        raise ValueError(
            f"the question {text[:80]!r} has placeholders for {', '.join(named)}; the sample's media are "
            f"{', '.join(kinds) or 'none'}"
        )
    if not text.strip() and not kinds:
        raise ValueError(
            "the question is empty, and the sample has no media; write a question, or leave the sample out"
        )
    places = {kind: iter([place for place, found in enumerate(kinds) if found == kind]) for kind in kinds}
    return Question(text=text, order=tuple(next(places[kind]) for kind in named or kinds))


def _only_turn(value: Any) -> tuple[str, list[MediaKind]]:
    """Return the text, and the kinds of the media that the turn's contents name."""
    if not isinstance(value, list):
        raise ValueError(f"the question is a {type(value).__name__}; wanted text or a list of chat turns")
    roles = [turn.get("role") if isinstance(turn, Mapping) else None for turn in value]
    if roles != ["user"]:
        raise ValueError(f"the question has turns of {roles}; wanted one turn of the user")
    content = value[0].get("content")
    if isinstance(content, str):
        return content, []
    parts: list[Any] = content if isinstance(content, list) else [None]
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if "text" not in kinds or not set(kinds) <= {"image", "video", "text"} or kinds != sorted(kinds, key="text".__eq__):
        raise ValueError(f"the user's turn has contents of {kinds}; wanted images or videos, then text")
    text = "".join(str(part.get("text", "")) for part in parts if part["type"] == "text")
    return text, [kind for kind in kinds if kind == "image" or kind == "video"]
