"""Damages good requests: byte by byte, or value by value inside their JSON. Pure functions of a `random.Random`.

The functions know nothing of Flight. The result depends only on the input and on the generator's state.
"""

import copy
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x80",
    b"\xff\xff\xff\x7f",
    b"\x01",
)
LITERALS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    str(1 << 63),
    str(-(1 << 63) - 1),
    str(1 << 64),
    str(10**400),
    "9" * 5000,
    "0.1",
    "-0.0",
    '"\\ud800"',
    '"\\u0000"',
    "[" * 3000 + "]" * 3000,
    '{"a":' * 2000 + "1" + "}" * 2000,
)
"""JSON literals that Python's own parser accepts, or almost accepts."""

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    0.5,
    -1e300,
    1e18,
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    -(1 << 63),
    1 << 64,
    1 << 200,
    "",
    " ",
    "\x00",
    "\ud800",
    "\u202e\U0001f600",
    "x" * 513,
    "y" * 70_000,
    "../../etc/passwd",
    "file:///etc/passwd",
    "s/",
    "d/",
    "s/" + "0" * 64,
    "d/" + "0" * 64 + "/" + "0" * 32,
    "nan",
    [],
    {},
    [[]],
    [None],
    [0] * 40,
    [1] * 33,
    [-1],
    [1 << 62, 4],
    {"": ""},
    {"verb": "resolve"},
    {"a": {"b": {"c": [1, 2, {"d": None}]}}},
)


def mutate_bytes(rng: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """Return the bytes with one to four small changes. Splices take their piece from `other`."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_BYTE_MUTATIONS)(rng, data, other)
    return data


def mutate_json(rng: random.Random, body: Any, keys: tuple[str, ...]) -> bytes:
    """Return a JSON value with one to three places changed, and sometimes with a literal that no serialiser would
    write."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body = _mutate_value(rng, body, keys)
    text = json.dumps(body)
    if rng.random() < 0.25:
        text = _mutate_text(rng, text)
    return text.encode("utf-8", "surrogatepass")


def with_other_numbers(rng: random.Random, ref: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ref with random numbers in place of some of its own. Sometimes its shape fits its size again."""
    changed = copy.deepcopy(dict(ref))
    for holder, key in (place for place in _places(changed) if type(place[0][place[1]]) is int):
        if rng.random() < 0.3:
            holder[key] = rng.choice((-1, 1)) * rng.getrandbits(rng.choice((1, 8, 24, 25, 32, 62, 63, 64, 200)))
    if "nbytes" in changed and rng.random() < 0.4:
        changed["shape"] = [changed["nbytes"]]
    return changed


def structures(seed_number: int, count: int, keys: tuple[str, ...]) -> list[Any]:
    """Return JSON structures that hypothesis generates; the keys of good requests are among their keys. The same seed
    gives the same structures."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(VALUES)
    names = st.sampled_from(keys) | st.text(max_size=8)
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
    )
    found: list[Any] = []

    @seed(seed_number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.dictionaries(names, values, max_size=5) | values)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def _flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    if not data:
        return b"\x00"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _overwrite(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    piece = rng.choice(INTERESTING)
    return data[:at] + piece + data[at + len(piece) :]


def _insert(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 2, 8, 64))) + data[at:]


def _truncate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _extend(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data + rng.randbytes(rng.choice((1, 7, 64, 5000)))


def _remove(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 4, 16)) :]


def _repeat(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    piece = data[at : at + rng.choice((1, 8, 40))]
    return data[:at] + piece * rng.choice((2, 3, 50)) + data[at:]


def _splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    start = rng.randrange(len(other) + 1)
    return data[: rng.randrange(len(data) + 1)] + other[start:]


def _empty(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return b""


_BYTE_MUTATIONS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    *(_flip,) * 4,
    *(_overwrite,) * 3,
    _insert,
    _truncate,
    _extend,
    _remove,
    _repeat,
    _splice,
    _empty,
)


def _value(rng: random.Random) -> Any:
    """Return a copy of a random value. It must be a copy, because the next change may be inside it."""
    return copy.deepcopy(rng.choice(VALUES))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, inner in items:
            found.append((holder, key))
            waiting.append(inner)
    return found


def _mutate_value(rng: random.Random, body: Any, keys: tuple[str, ...]) -> Any:
    places = _places(body)
    if not places or rng.random() < 0.05:
        return _value(rng)
    holder, key = rng.choice(places)
    value = holder[key]
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(keys)] = _value(rng)
        case 2 if isinstance(value, str) and value:
            at = rng.randrange(len(value))
            holder[key] = value[:at] + rng.choice(("", "\x00", "/", "é", "0", "\n")) + value[at + 1 :]
        case 2 | 3 if isinstance(value, int):
            holder[key] = rng.choice((value + 1, value - 1, -value, value << 32, value << 64, float(value), str(value)))
        case 4:
            holder[key] = [value] * rng.choice((1, 2, 100))
        case _:
            holder[key] = _value(rng)
    return body


def _mutate_text(rng: random.Random, text: str) -> str:
    """Return the text with a duplicate key, or with a literal in the place of a value."""
    at = text.find(": ", rng.randrange(len(text) + 1))
    if at < 0:
        return text + rng.choice(("]", "}", " {}", ",", "\x00"))
    if rng.random() < 0.3:
        start = text.rfind('"', 0, max(0, at - 1))
        key = text[start:at] if start >= 0 else '"name"'
        return text[: at + 2] + "1, " + key + ": " + text[at + 2 :]
    end = min((found for mark in ",}]" if (found := text.find(mark, at)) >= 0), default=len(text))
    return text[: at + 2] + rng.choice(LITERALS) + text[end:]
