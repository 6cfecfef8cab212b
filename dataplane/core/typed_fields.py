"""Reads the fields of JSON objects with a check of their types. Standard library only."""

from collections.abc import Mapping
from typing import Any

Types = tuple[type, ...]
"""The types that a field may have."""


def read_fields(
    data: Mapping[str, Any], what: str, fields: Mapping[str, Types], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of all `fields` of a JSON object, after a check of their types. `what` names the object in
    errors.

    Requests have thousands of refs, so the check of a correct value is one comparison of its type.
    """
    read = {}
    for key, types in fields.items():
        try:
            value = data[key]
        except (KeyError, TypeError):
            value = defaults.get(key, _MISSING)
        read[key] = value if type(value) in types else take_field(data, what, key, *types)
    return read


_MISSING = object()
"""The value of a field that is missing and has no default; no type check accepts it."""


def take_field(data: Mapping[str, Any], what: str, key: str, *types: type) -> Any:
    """Return `data[key]`, which must be of one of `types` (a bool is not an int here). Raises ValueError if not."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} is {type(data).__name__}; wanted a JSON object")
    if key not in data:
        raise ValueError(f"{what}.{key} is missing; found only {', '.join(sorted(data)) or 'nothing'}")
    value = data[key]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise ValueError(f"{what}.{key} is {str(value)[:80]!r} ({type(value).__name__}); wanted {wanted}")
    return value
