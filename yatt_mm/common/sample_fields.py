"""Reads and changes the fields of a sample."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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
