"""Authentication and TLS of a node: where it may listen, its certificate, and the gate that every Flight call passes.

The gate turns a token into a right. Each verb needs a right, which is checked with the verb (`flight_server.py`).
"""

import ipaddress
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError, UnauthenticatedError
from dataplane.core.flight_errors import to_flight
from dataplane.core.process import TRIMMER
from dataplane.core.rights import Right
from dataplane.core.token_file import TokenFile
from dataplane.server.meter import Meter

GATE = "gate"
"""The key of the gate among a server's middleware."""
MAX_HEADER_CHARS = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The settings of a node for tokens, TLS and the addresses at which it may listen."""

    token_file: Path | None = None
    """The file of bearer tokens and their rights. Without this file every client that reaches the node is admin."""
    tls_cert: Path | None = None
    """The file of the node's certificate chain (PEM). With a certificate, the node accepts only TLS."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """The file of a certificate authority, for mutual TLS: clients must show a certificate that it signed."""
    is_insecure: bool = False
    """True if the node may listen beyond loopback without knowing its callers: with neither tokens nor a client
    authority."""

    @property
    def scheme(self) -> str:
        """The scheme of the node's address: `grpc` or `grpc+tls`."""
        return "grpc+tls" if self.tls_cert else "grpc"

    def check_host(self, host: str) -> None:
        """Raise BadRequestError for an address that other machines reach while the node does not know its callers.

        TLS alone is no protection: it proves the node to its callers, and not the callers to the node.
        """
        knows_callers = bool(self.token_file or self.tls_ca)
        is_local = is_loopback(host)
        if not (is_local or knows_callers or self.is_insecure):
            found = "--tls-cert proves this node, but no caller" if self.tls_cert else "it asks no caller for anything"
            wanted = "add --token-file FILE" + (
                ", or --tls-ca CA for client certificates" if self.tls_cert else " and --tls-cert CERT --tls-key KEY"
            )
            raise BadRequestError(
                f"host is {host!r}, which other machines may reach, and anyone there could read and fill this node "
                f"({found}); {wanted} (or --insecure on a network of your own)"
            )
        if not (is_local or self.tls_cert):
            log.warning("tokens and data cross the network in the clear: add --tls-cert and --tls-key")
        if not knows_callers and not (is_local and self.tls_cert is None):
            log.warning(
                "every client that reaches %s may do everything: add --token-file, or --tls-ca for client certificates",
                host,
            )

    def server_options(self) -> dict[str, Any]:
        """Return the TLS arguments of a Flight server. Raises BadRequestError if the files do not fit together."""
        if self.tls_cert is None:
            given = " and ".join(["--tls-key"] * bool(self.tls_key) + ["--tls-ca"] * bool(self.tls_ca))
            if given:
                raise BadRequestError(
                    f"{given} without --tls-cert: a node without a certificate speaks no TLS; add --tls-cert and "
                    "--tls-key, the node's own"
                )
            return {}
        if self.tls_key is None:
            raise BadRequestError("--tls-cert needs its private key: add --tls-key")
        _check_certificates(self.tls_cert, self.tls_key, self.tls_ca)
        options: dict[str, Any] = {"tls_certificates": [(self.tls_cert.read_bytes(), self.tls_key.read_bytes())]}
        if self.tls_ca is not None:
            options |= {"verify_client": True, "root_certificates": self.tls_ca.read_bytes()}
        return options

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the Flight server's TLS settings for a Python socket; None if the node has no certificate."""
        if self.tls_cert is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.tls_cert, self.tls_key)
        if self.tls_ca is not None:
            context.load_verify_locations(self.tls_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Return True if the address means every address of this machine, so that clients cannot use it."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def host_in_uri(host: str) -> str:
    """Return an address in the form that URIs need: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


class Caller(fl.ServerMiddleware):
    """The client that makes a call, and its right. Each verb checks the right."""

    def __init__(self, right: Right, tokens: TokenFile | None = None, token: str = "") -> None:
        super().__init__()
        self.right = right
        self._tokens = tokens
        self._token = token

    def check_again(self) -> None:
        """Raise UnauthenticatedError or ForbiddenError if the token has expired, is no longer in the file, or lost its
        right. Streams that stay open call this."""
        if self._tokens is not None and self._tokens.right_of(self._token) < self.right:
            raise UnauthenticatedError("the token shown has fewer rights than when this stream began; open a new one")


class Gate(fl.ServerMiddlewareFactory):
    """Reads the headers of every call before its verb runs. Without a valid token the verb never runs."""

    def __init__(self, tokens: TokenFile | None, meter: Meter) -> None:
        super().__init__()
        self._tokens = tokens
        self._meter = meter

    def start_call(self, info: fl.CallInfo, headers: dict[str, list[Any]]) -> Caller:
        """Return the caller. If its token is missing or not valid, raise a Flight error with the reason."""
        if self._tokens is None:
            return Caller(Right.ADMIN)
        try:
            token = bearer(headers.get("authorization", []))
            return Caller(self._tokens.right_of(token), self._tokens, token)
        except UnauthenticatedError as error:
            self._meter.count_error("gate", type(error).__name__)
            TRIMMER.request()  # its message has arrived, of any size
            raise to_flight(error) from None


def caller_of(context: fl.ServerCallContext) -> Caller:
    """Return the caller of this call."""
    caller = context.get_middleware(GATE)
    assert isinstance(caller, Caller)
    return caller


def right_of(context: fl.ServerCallContext) -> Right:
    """Return the right of the caller of this call."""
    return caller_of(context).right


def bearer(shown: Sequence[Any]) -> str:
    """Return the bearer token of the authorization headers, or an empty string if there are none.
    UnauthenticatedError for headers of another kind."""
    if not shown:
        return ""
    scheme, _, token = str(shown[0])[:MAX_HEADER_CHARS].partition(" ")
    if scheme.lower() != "bearer" or len(shown) > 1:
        raise UnauthenticatedError("the authorization header is no bearer token; wanted 'Bearer TOKEN', once")
    return token.strip()


def _check_certificates(cert: Path, key: Path, ca: Path | None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise BadRequestError(
            f"--tls-cert {cert} and --tls-key {key} make no TLS server ({error}); wanted PEM files, the key that of "
            "the certificate and without a passphrase"
        ) from error
    try:
        if ca is not None:
            context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise BadRequestError(f"--tls-ca {ca} holds no certificates ({error}); wanted a PEM file") from error
