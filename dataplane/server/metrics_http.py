"""The HTTP port for metrics: `/metrics` for Prometheus, and `/` with a page of plain text for people.

It is protected like the node: the same certificate, and the same tokens as a bearer header (any right is enough).
Read-only.
"""

import contextlib
import http.server
import logging
import socket
import threading
import time
from functools import partial
from http import HTTPStatus
from typing import Any

from dataplane.core.block_timeouts import BLOCK_TIMEOUTS
from dataplane.core.errors import BadRequestError, OverloadedError, UnauthenticatedError
from dataplane.core.token_file import TokenFile
from dataplane.server.auth import Security, bearer, host_in_uri, is_loopback
from dataplane.server.call_limits import Slots
from dataplane.server.prometheus import CONTENT_TYPE, Metrics

REQUEST_TIMEOUT_S = 10.0
MAX_REQUESTS = 32

log = logging.getLogger(__name__)


class MetricsServer:
    """The HTTP server for metrics. It serves from its own threads, from construction until `close`."""

    def __init__(self, host: str, port: int, metrics: Metrics, security: Security, tokens: TokenFile | None) -> None:
        if not (is_loopback(host) or tokens or security.tls_ca or security.is_insecure):
            raise BadRequestError(
                f"--metrics-port on {host} would show this node's counters to every client that reaches it; "
                "add --token-file, --tls-ca or --insecure"
            )
        try:
            self._server = _Server(host, port, metrics, tokens)
        except OSError as error:
            raise BadRequestError(f"--metrics-port {port} on {host}: {error}; choose another, 0 takes any") from error
        context = security.ssl_context()
        if context is not None:  # each request's thread does its own handshake
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        scheme = "https" if context else "http"
        self.url = f"{scheme}://{host_in_uri(host)}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, metrics: Metrics, tokens: TokenFile | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.metrics = metrics
        self.tokens = tokens
        self.slots = Slots(MAX_REQUESTS, "requests for metrics", "rate of scraping")
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a slot before a thread is started, so that clients which send nothing, or no token, cannot take an
        unlimited number of threads."""
        try:
            self.slots.take()
        except OverloadedError as error:
            log.debug("a request for metrics from %s is refused: %s", client_address, error)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.slots.give_back()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a request in its thread, the handshake included, within its deadline."""
        try:
            with BLOCK_TIMEOUTS.call_at(time.monotonic() + REQUEST_TIMEOUT_S, partial(_cut, request)):
                super().process_request_thread(request, client_address)
        finally:
            self.slots.give_back()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore broken connections and failed handshakes, because they are the client's faults."""
        log.debug("a request for metrics from %s broke", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    server_version = "dataplane"
    sys_version = ""

    def do_GET(self) -> None:  # http.server asks for this name
        try:
            if self.server.tokens is not None:
                self.server.tokens.right_of(bearer(self.headers.get_all("authorization") or []))
            self._answer()
        except UnauthenticatedError as error:
            self._send(HTTPStatus.UNAUTHORIZED, f"{error}\n", [("WWW-Authenticate", "Bearer")])

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(HTTPStatus.OK, self.server.metrics.prometheus(), [], CONTENT_TYPE)
        elif path == "/":
            self._send(HTTPStatus.OK, self.server.metrics.page())
        else:
            self._send(HTTPStatus.NOT_FOUND, f"{path[:60]!r} is not here; wanted / or /metrics\n")

    def _send(
        self,
        status: HTTPStatus,
        body: str | bytes,
        headers: "list[tuple[str, str]] | None" = None,
        kind: str = "text/plain; charset=utf-8",
    ) -> None:
        raw = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for key, value in [*(headers or []), ("Content-Type", kind), ("Content-Length", str(len(raw)))]:
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(raw)


def _cut(request: socket.socket) -> None:
    """End a connection whose time is over. The thread that reads from the connection then gets the end of the
    stream."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(request, socket.SHUT_RDWR)  # of the socket, because TLS would wait for the client
