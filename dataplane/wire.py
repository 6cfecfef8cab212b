"""What client and node agree on: JSON bodies, the locator schema, and errors that survive the trip.

Bodies are JSON or Arrow; nothing is ever unpickled.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.errors import (
    ERRORS,
    BadRequestError,
    DataPlaneError,
    ForbiddenError,
    NodeTimeoutError,
    NodeUnavailableError,
    UnauthenticatedError,
)
from dataplane.refs import Ref, check_shape

DEFAULT_PORT = 8815
MAX_BODY_BYTES = 64 << 20
"""Of a body that lists refs or names."""
SMALL_BODY_BYTES = 64 << 10
"""Of a body that lists none."""
ONE_OBJECT_BYTES = 1 << 20
"""Of a body about one object, with its meta."""
_MAX_SIGNS = 1 << 22
"""Commas and brackets of a body, about 64 for each of `MAX_ITEMS`: each may become a value of a hundred bytes."""
MAX_META_BYTES = 64 << 10
MAX_NAME_CHARS = 512
MAX_ITEMS = 65_536
"""Names, refs, indices or leases in one request."""
MAX_ERROR_BYTES = 2000
MAX_NUMBER = 1 << 63
"""No size, offset or count reaches it."""
BATCH_BYTES = 2 << 20
"""Size of a DoGet / DoPut record batch; Flight is fastest between 1 and 8 MiB."""

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}
"""The dtypes of objects, by numpy name."""

LOCATORS = pa.schema(
    [
        ("segment", pa.int32()),
        ("offset", pa.int64()),
        ("nbytes", pa.int64()),
        ("dtype", pa.dictionary(pa.int8(), pa.string())),
        ("shape", pa.list_(pa.int64())),
        ("generation", pa.int64()),
        ("lease", pa.int64()),
    ]
)
"""A row per object asked for; offset is -1 where it is not resident."""

PIECES = pa.schema(
    [
        ("object", pa.int32()),
        ("start", pa.int64()),
        ("info", pa.string()),
        ("data", pa.binary()),
    ]
)
"""A row per piece of an object in a DoGet of many: which of the refs, where in it, and the bytes.

`info` stands in the first row of each object: JSON {"ref", "checksum"}, or {"error", "message"} in the place of bytes.
"""


_encode = json.JSONEncoder(separators=(",", ":")).encode


def dump(body: Mapping[str, Any]) -> bytes:
    """A JSON body."""
    return _encode(body).encode()


def parse(body: bytes | pa.Buffer | None, what: str, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """A JSON object out of a body. BadRequestError says what was found."""
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
    """body[key] of one of these types, or the default. BadRequestError says what was found and wanted."""
    if key not in body:
        if default is ...:
            raise BadRequestError(f"{what} has no {key!r}; found {', '.join(sorted(body)) or 'nothing'}")
        return default
    value = body[key]
    if type(value) not in types:
        wanted = " or ".join(kind.__name__ for kind in types)
        raise BadRequestError(f"{what}.{key} is {str(value)[:60]!r} ({type(value).__name__}); wanted {wanted}")
    return value


_PLURALS = {str: "strings; wanted a list of names", int: "whole numbers; wanted a list of them"}


def take_list(body: Mapping[str, Any], what: str, key: str, kind: type, default: Any = ...) -> list[Any]:
    """body[key] as a list of nothing but strings, or of nothing but whole numbers."""
    items: list[Any] = take(body, what, key, list, default=default)
    _check_count(items, what, key)
    if not set(map(type, items)) <= {kind}:
        raise BadRequestError(f"{what}.{key} holds something else than {_PLURALS[kind]}")
    return items


def take_refs(body: Mapping[str, Any], what: str) -> list[Ref]:
    """The refs of a request."""
    items = take(body, what, "refs", list)
    _check_count(items, what, "refs")
    try:
        return [Ref.from_dict(item) for item in items]
    except ValueError as error:
        raise BadRequestError(f"{what}: {error}") from error


def take_timeout_s(body: Mapping[str, Any], what: str) -> float:
    """How long the caller is willing to wait: above 0, at most a day; 60 s if it does not say."""
    timeout_s = take(body, what, "timeout_s", int, float, default=60.0)
    if not 0 < timeout_s <= 86_400:
        raise BadRequestError(f"{what}.timeout_s is {timeout_s}; wanted more than 0 and at most 86400")
    return float(timeout_s)


def check_array(dtype: str, shape: Sequence[int] | None, nbytes: int) -> tuple[int, ...]:
    """The shape of an array of these bytes; a flat one if none is given. BadRequestError if they do not agree."""
    if dtype not in ITEM_BYTES:
        raise BadRequestError(f"dtype is {dtype!r}; wanted one of {', '.join(ITEM_BYTES)}")
    item = ITEM_BYTES[dtype]
    if shape is None:
        if nbytes % item:
            raise BadRequestError(f"{nbytes} bytes are no whole number of {dtype} ({item} bytes each); give the dtype")
        return (nbytes // item,)
    try:
        check_shape(shape)
    except ValueError as error:
        raise BadRequestError(str(error)) from error
    if math.prod(shape) * item != nbytes:
        raise BadRequestError(
            f"shape {list(shape)} of {dtype} takes {math.prod(shape) * item} bytes, found {nbytes}: change one of them"
        )
    return tuple(shape)


def check_plain_name(name: str) -> str:
    """A name that a writer may choose."""
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise BadRequestError(
            f"name {name[:60]!r} of {len(name)} characters; wanted 1 to {MAX_NAME_CHARS} printable ones"
        )
    if name.startswith(("s/", "d/")):
        raise BadRequestError(f"name {name!r} begins like a source or derived object; choose another prefix")
    return name


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around each read of a stream: what is no Arrow IPC is the caller's error, and Arrow raises it as many classes."""
    try:
        yield
    except fl.FlightError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        found = str(error).split(". Detail:")[0][:300]
        wanted = "wanted messages as an Arrow library writes them"
        raise BadRequestError(f"{what} is not Arrow IPC ({found}); {wanted}") from error


def to_flight(error: DataPlaneError) -> fl.FlightError:
    """The Flight error that carries ours."""
    text = _clip(str(error))
    extra = dump({"error": type(error).__name__, "message": text})
    kinds = {
        NodeTimeoutError: fl.FlightTimedOutError,
        UnauthenticatedError: fl.FlightUnauthenticatedError,
        ForbiddenError: fl.FlightUnauthorizedError,
    }
    return kinds.get(type(error), fl.FlightServerError)(text, extra_info=extra)


def _clip(text: str) -> str:
    """As much of a message as gRPC's trailers hold: they carry it three times, escaped, in 8 KiB."""
    text = text.encode("utf-8", "backslashreplace").decode()  # JSON may hold lone surrogates, gRPC takes none
    while len(json.dumps(text)) > MAX_ERROR_BYTES:
        text = text[: len(text) * 3 // 4] + "..."
    return text


def from_body(body: Mapping[str, Any]) -> DataPlaneError | None:
    """Our error out of a body that carries one."""
    if "error" not in body:
        return None
    return ERRORS.get(str(body["error"]), DataPlaneError)(str(body.get("message", "")))


def from_flight(error: pa.ArrowException, uri: str, what: str, timeout_s: float) -> DataPlaneError:
    """Our error out of what Flight raised; names the peer, the call and the seconds."""
    extra = error.extra_info if isinstance(error, fl.FlightError) else None
    if extra:
        try:
            carried = from_body(parse(extra, "error"))
        except BadRequestError:
            carried = None
        if carried is not None:
            return carried
    text = str(error).split(". gRPC client debug context")[0].split(". Detail:")[0]
    if isinstance(error, fl.FlightTimedOutError):
        return NodeTimeoutError(
            f"{uri} did not finish {what} in {timeout_s:g} s; raise timeout_s or ask for less at once"
        )
    if isinstance(error, (fl.FlightUnavailableError, fl.FlightCancelledError)):
        return NodeUnavailableError(
            _tell_tls(text, uri) or f"no data-plane node answers {what} at {uri} ({text}); is it running?"
        )
    return DataPlaneError(f"{what} at {uri} failed: {text}")


def _check_count(items: Sequence[Any], what: str, key: str) -> None:
    if len(items) > MAX_ITEMS:
        raise BadRequestError(
            f"{what}.{key} has {len(items)} entries; wanted at most {MAX_ITEMS}: ask for less at once"
        )


def _tell_tls(text: str, uri: str) -> str:
    """What keeps two sides of a connection apart, where gRPC's words let us tell; else nothing."""
    if "wrong version number" in text:
        return f"the node at {uri} speaks no TLS: use grpc:// instead of grpc+tls://, or start it with --tls-cert"
    if "certificate verify failed" in text:
        return (
            f"the certificate of the node at {uri} is not signed by a CA that this client knows, or is for another "
            "host: set DATAPLANE_TLS_CA to the CA that signed it"
        )
    if "failed to connect" in text and "Socket closed" in text:
        if uri.startswith("grpc+tls"):
            return (
                f"the node at {uri} closed the connection: it wants a client certificate that its --tls-ca signed; set "
                "DATAPLANE_TLS_CERT and DATAPLANE_TLS_KEY"
            )
        return f"the node at {uri} closed the connection: it speaks TLS; use grpc+tls:// and set DATAPLANE_TLS_CA"
    return ""
