"""Open a connection to a node, with the token and certificates that the node asks for.

`connect` is the only place where Flight clients are made. `Credentials` come from the caller or the environment.
"""

import ipaddress
import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError
from dataplane.core.token_file import first_token

CLIENT_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.optimization_target", "throughput"),
    ("grpc.use_local_subchannel_pool", 1),  # otherwise clients of one node share a connection, and one core
    ("grpc.initial_reconnect_backoff_ms", 100),  # gRPC waits 1 s to 2 min by itself; a node that restarts takes 1 s
    ("grpc.max_reconnect_backoff_ms", 500),
]
"""The gRPC options of every connection."""
TLS_SCHEMES = ("grpc+tls://", "grpcs://")
"""The beginnings of the addresses for which TLS is used."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The token and certificate that a client sends to a node, and the CA with which it checks the node."""

    token: str = ""
    """The bearer token; with an empty string no token is sent."""
    token_file: Path | None = None
    """A file whose first token is sent instead of `token`. It is read for every new connection."""
    tls_ca: Path | None = None
    """The PEM file of the CA that signed the node's certificate; without it the root CAs of the system are used."""
    tls_cert: Path | None = None
    """The PEM file of the client's own certificate, for nodes that ask for a certificate (mutual TLS)."""
    tls_key: Path | None = None
    """The PEM file of the private key of `tls_cert`."""
    is_insecure: bool = False
    """True on a network of your own: nothing is said of a token that crosses it unencrypted."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the credentials from environment variables.

        They are DATAPLANE_TOKEN_FILE, DATAPLANE_TOKEN, DATAPLANE_TLS_CA, DATAPLANE_TLS_CERT, DATAPLANE_TLS_KEY, and
        DATAPLANE_INSECURE, which is 1 for `is_insecure`.
        """
        found = os.environ if environ is None else environ

        def path(key: str) -> Path | None:
            return Path(found[key]) if found.get(key) else None

        return cls(
            token=found.get("DATAPLANE_TOKEN", ""),
            token_file=path("DATAPLANE_TOKEN_FILE"),
            tls_ca=path("DATAPLANE_TLS_CA"),
            tls_cert=path("DATAPLANE_TLS_CERT"),
            tls_key=path("DATAPLANE_TLS_KEY"),
            is_insecure=found.get("DATAPLANE_INSECURE") == "1",
        )

    def shown_token(self) -> str:
        """Return the token to send, empty if there is none. Raises BadRequestError if the token file cannot be used."""
        return first_token(self.token_file) if self.token_file else self.token

    def __repr__(self) -> str:
        token = "..." if self.token else "none"
        return (
            f"Credentials(token={token}, token_file={self.token_file}, tls_ca={self.tls_ca}, tls_cert={self.tls_cert})"
        )


def connect(uri: str, credentials: Credentials | None = None) -> fl.FlightClient:
    """Return a Flight client of the node at `uri`, which connects on first use.

    Without `credentials`, the credentials in the environment variables are used. The token is sent as a header,
    unencrypted unless `uri` begins with grpc+tls:// or grpcs://. Raises BadRequestError if `uri` is not an address or
    the credentials cannot be used.
    """
    shown = Credentials.from_environment() if credentials is None else credentials
    token = shown.shown_token()
    options: dict[str, Any] = _tls_options(shown) if uri.startswith(TLS_SCHEMES) else {}
    if token:
        if not token.isascii() or not token.isprintable():
            raise BadRequestError("the token has characters that are not printable ASCII; check DATAPLANE_TOKEN")
        if not (uri.startswith(TLS_SCHEMES) or _is_loopback(uri) or shown.is_insecure):
            log.warning("the token for %s crosses the network in the clear: use grpc+tls://", uri)
        options["middleware"] = [_ShowToken(token)]
    try:
        return fl.FlightClient(uri, generic_options=CLIENT_OPTIONS, **options)
    except pa.ArrowException as error:
        raise BadRequestError(
            f"{uri!r} is not the address of a node ({error}); wanted grpc://127.0.0.1:PORT"
        ) from error


def _tls_options(shown: Credentials) -> dict[str, Any]:
    """Return the TLS arguments of a Flight client. Raises BadRequestError if the PEM files are missing or cannot be
    used."""
    if (shown.tls_cert is None) != (shown.tls_key is None):
        raise BadRequestError(
            "a client certificate and its key go together: set DATAPLANE_TLS_CERT and DATAPLANE_TLS_KEY"
        )
    context, what = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ""
    try:
        if shown.tls_ca is not None:
            what = f"the CA {shown.tls_ca}"
            context.load_verify_locations(shown.tls_ca)
        if shown.tls_cert is not None:
            what = f"the client certificate {shown.tls_cert} with the key {shown.tls_key}"
            context.load_cert_chain(shown.tls_cert, shown.tls_key, password="")
    except (OSError, ValueError) as error:
        raise BadRequestError(f"{what} cannot be used ({error}); wanted PEM files without a passphrase") from error
    return {
        "tls_root_certs": shown.tls_ca.read_bytes() if shown.tls_ca else None,
        "cert_chain": shown.tls_cert.read_bytes() if shown.tls_cert else None,
        "private_key": shown.tls_key.read_bytes() if shown.tls_key else None,
    }


def _is_loopback(uri: str) -> bool:
    """Return whether the traffic to an address stays on this machine."""
    host = urlsplit(uri).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or uri.startswith("grpc+unix")


class _ShowToken(fl.ClientMiddlewareFactory):
    """The Flight middleware that adds the token to the headers of every call."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._headers = {"authorization": f"Bearer {token}"}

    def start_call(self, info: fl.CallInfo) -> fl.ClientMiddleware:
        """Return the middleware of one call. Flight calls this method."""
        return _Headers(self._headers)


class _Headers(fl.ClientMiddleware):
    """The Flight middleware of one call, which adds the given headers to it."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__()
        self._headers = headers

    def sending_headers(self) -> Mapping[str, str]:
        """Return the headers to add. Flight calls this method."""
        return self._headers
