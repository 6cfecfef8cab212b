"""JSON bodies of requests and replies: write them, and read them with checks of size, types and values.

The errors name what was found and what was wanted. No data is ever unpickled.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from dataplane.core.errors import BadRequestError
from dataplane.core.refs import Ref

MAX_BODY_BYTES = 64 << 20
"""The maximum size in bytes of a body that lists refs or names."""


SMALL_BODY_BYTES = 64 << 10
"""The maximum size in bytes of a body that lists no refs or names."""


ONE_OBJECT_BYTES = 1 << 20
"""The maximum size in bytes of a body about one object, with the object's meta."""


_MAX_SIGNS = 1 << 22
"""The maximum number of commas and opening brackets in a body, 64 for each of `MAX_ITEMS`.

This limits memory: each comma or bracket may become a Python value of about a hundred bytes.
"""


MAX_META_BYTES = 64 << 10
"""The maximum size in bytes of an object's meta."""


MAX_NAME_CHARS = 512
"""The maximum length of an object's name, in characters."""


MAX_ITEMS = 65_536
"""The maximum number of names, refs, indices or leases in one request."""


_PLURALS = {str: "strings; wanted a list of names", int: "whole numbers; wanted a list of them"}
"""The end of the error message about a list with items of another type, by the wanted type."""


_encode = json.JSONEncoder(separators=(",", ":")).encode


def dump(body: Mapping[str, Any]) -> bytes:
    """Return a body as the bytes of a JSON object."""
    return _encode(body).encode()


def parse(body: bytes | pa.Buffer | None, what: str, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """Return the JSON object in a body. Raises BadRequestError, which names the body as `what`, if the body is too big
    or is not a JSON object."""
    nbytes = 0 if body is None else len(body) if isinstance(body, bytes) else body.size
    if nbytes > max_bytes:
        raise BadRequestError(f"{what} has {nbytes} bytes; wanted at most {max_bytes}: ask for less at once")
    raw = b"" if body is None else bytes(body)
    if nbytes > SMALL_BODY_BYTES:
        num_signs = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
        if num_signs > _MAX_SIGNS:
            raise BadRequestError(
                f"{what} has {num_signs} commas and brackets; wanted at most {_MAX_SIGNS}: ask for less at once"
            )
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{what} is not JSON ({error}); found {raw[:60]!r}, wanted a JSON object") from error
    if not isinstance(parsed, dict):
        raise BadRequestError(f"{what} is a JSON {type(parsed).__name__}; wanted an object")
    return parsed


def take(body: Mapping[str, Any], what: str, key: str, *types: type, default: Any = ...) -> Any:
    """Return `body[key]`, which must be of one of these types, or the default if the key is missing.

    Raises BadRequestError that says what was found and wanted, also if the key is missing and there is no default.
    """
    if key not in body:
        if default is ...:
            raise BadRequestError(f"{what} has no {key!r}; found {', '.join(sorted(body)) or 'nothing'}")
        return default
    value = body[key]
    if type(value) not in types:
        wanted = " or ".join(kind.__name__ for kind in types)
        raise BadRequestError(f"{what}.{key} is {str(value)[:60]!r} ({type(value).__name__}); wanted {wanted}")
    return value


def take_list(body: Mapping[str, Any], what: str, key: str, kind: type, default: Any = ...) -> list[Any]:
    """Return `body[key]`, which must be a list whose items are all strings, or all whole numbers (`kind`)."""
    items: list[Any] = take(body, what, key, list, default=default)
    _check_count(items, what, key)
    if not set(map(type, items)) <= {kind}:
        raise BadRequestError(f"{what}.{key} holds items that are not {_PLURALS[kind]}")
    return items


def take_refs(body: Mapping[str, Any], what: str) -> list[Ref]:
    """Return the refs of a request. Raises BadRequestError if a ref is malformed or there are too many."""
    items = take(body, what, "refs", list)
    _check_count(items, what, "refs")
    try:
        return [Ref.from_dict(item) for item in items]
    except ValueError as error:
        raise BadRequestError(f"{what}: {error}") from error


def take_timeout_s(body: Mapping[str, Any], what: str) -> float:
    """Return the timeout of a request in seconds: above 0, at most a day; 60 s if the request has none."""
    timeout_s = take(body, what, "timeout_s", int, float, default=60.0)
    if not 0 < timeout_s <= 86_400:
        raise BadRequestError(f"{what}.timeout_s is {timeout_s}; wanted more than 0 and at most 86400")
    return float(timeout_s)


def check_plain_name(name: str) -> str:
    """Return `name` if a client may choose it for a plain object. Raises BadRequestError if not."""
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise BadRequestError(
            f"name {name[:60]!r} of {len(name)} characters; wanted 1 to {MAX_NAME_CHARS} printable characters"
        )
    if name.startswith(("s/", "d/")):
        raise BadRequestError(f"name {name!r} begins like a source or derived object; choose another prefix")
    return name


def _check_count(items: Sequence[Any], what: str, key: str) -> None:
    """Check that a list has at most `MAX_ITEMS` entries. Raises BadRequestError if not."""
    if len(items) > MAX_ITEMS:
        raise BadRequestError(
            f"{what}.{key} has {len(items)} entries; wanted at most {MAX_ITEMS}: ask for less at once"
        )
