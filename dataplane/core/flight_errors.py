"""Convert the errors of the data plane into Flight errors and back.

A node sends `to_flight`; a client reads with `from_flight`, which adds the node's address and the call to the text.
"""

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
"""The longest message of an error that is sent, in bytes of JSON."""


def to_flight(error: DataPlaneError) -> fl.FlightError:
    """Return the Flight error that carries a data-plane error: class name and message in its extra info."""
    text = _clip(str(error))
    extra = dump({"error": type(error).__name__, "message": text})
    kinds = {
        NodeTimeoutError: fl.FlightTimedOutError,
        UnauthenticatedError: fl.FlightUnauthenticatedError,
        ForbiddenError: fl.FlightUnauthorizedError,
    }
    return kinds.get(type(error), fl.FlightServerError)(text, extra_info=extra)


def from_body(body: Mapping[str, Any]) -> DataPlaneError | None:
    """Return the data-plane error that a JSON body carries; None if it carries none."""
    if "error" not in body:
        return None
    return ERRORS.get(str(body["error"]), DataPlaneError)(str(body.get("message", "")))


def from_flight(error: pa.ArrowException, uri: str, what: str, timeout_s: float) -> DataPlaneError:
    """Return the data-plane error for an error that Flight raised in the call `what` to the node at `uri`.

    If the node sent a data-plane error, that error is returned; otherwise an error whose text names the node, the call
    and the timeout.
    """
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
    """Return the message, shortened to `MAX_ERROR_BYTES`. It must fit into gRPC's trailers, which hold 8 KiB and carry
    it three times, escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()  # JSON may hold lone surrogates, gRPC takes none
    while len(json.dumps(text)) > MAX_ERROR_BYTES:
        text = text[: len(text) * 3 // 4] + "..."
    return text


def _tell_tls(text: str, uri: str) -> str:
    """Return a message about a TLS mismatch between client and node if gRPC's text shows a mismatch; else an empty
    string."""
    if "wrong version number" in text:
        return f"the node at {uri} does not speak TLS: use grpc:// instead of grpc+tls://, or start it with --tls-cert"
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
