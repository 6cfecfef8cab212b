"""Errors that cross the wire: our errors as Flight errors, and back again, with the peer and the call in the text."""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import (
    ERRORS,
    BadRequestError,
    DataPlaneError,
    ForbiddenError,
    NodeTimeoutError,
    NodeUnavailableError,
    UnauthenticatedError,
)
from dataplane.core.json_body import dump, parse

MAX_ERROR_BYTES = 2000


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


def _clip(text: str) -> str:
    """As much of a message as gRPC's trailers hold: they carry it three times, escaped, in 8 KiB."""
    text = text.encode("utf-8", "backslashreplace").decode()  # JSON may hold lone surrogates, gRPC takes none
    while len(json.dumps(text)) > MAX_ERROR_BYTES:
        text = text[: len(text) * 3 // 4] + "..."
    return text


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
