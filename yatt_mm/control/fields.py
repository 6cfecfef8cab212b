"""Where question and answer stand in a sample's fields, and the question's text out of what data sets put there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLACEHOLDERS = ("<image>", "<video>")


def take_field(fields: Mapping[str, Any], key: str) -> Any:
    """The value at a key; `a.b` looks into nested objects. ValueError says what there is instead."""
    value: Any = fields
    for place, part in enumerate(key.split(".")):
        if not isinstance(value, Mapping) or part not in value:
            above = ".".join(key.split(".")[:place])
            found = sorted(value) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise ValueError(f"the sample lacks {key}; {above or 'it'} has {found}")
        value = value[part]
    return value


def with_field(fields: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of the fields with another value at a key that is there."""
    part, dot, rest = key.partition(".")
    return {**fields, part: with_field(fields[part], rest, value) if dot else value}


def question_text(value: Any, num_media: int) -> str:
    """The question of one user turn: text, or verl's and OpenAI's chat turns if there is only that one.

    The trainer's prompts put all media before the text, so placeholders (`<image>`) are taken off the beginning, one
    per medium; anywhere else, or in another number, they would mean another prompt, and ValueError says so.
    """
    text = value if isinstance(value, str) else _only_turn(value)
    bare, num_found = text.lstrip(), 0
    while bare.startswith(PLACEHOLDERS):
        bare, num_found = bare.partition(">")[2].lstrip(), num_found + 1
    if any(placeholder in bare for placeholder in PLACEHOLDERS):
        raise ValueError(f"the question {text[:80]!r} has a placeholder in its middle; media come before the text here")
    if num_found not in (0, num_media):
        raise ValueError(f"the question {text[:80]!r} has {num_found} placeholders for {num_media} media")
    return bare if num_found else text


def _only_turn(value: Any) -> str:
    if not isinstance(value, list):
        raise ValueError(f"the question is a {type(value).__name__}; wanted text or a list of chat turns")
    roles = [turn.get("role") if isinstance(turn, Mapping) else None for turn in value]
    if roles != ["user"]:
        raise ValueError(f"the question has turns of {roles}; wanted one turn of the user")
    content = value[0].get("content")
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if "text" not in kinds or not set(kinds) <= {"image", "video", "text"} or kinds != sorted(kinds, key="text".__eq__):
        raise ValueError(f"the user's turn has contents of {kinds}; wanted images or videos, then text")
    return "".join(str(part.get("text", "")) for part in parts if part["type"] == "text")
