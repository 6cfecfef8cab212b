"""The HTTP port for metrics, served by prometheus_client.

It is protected like the node, which has checked that it may listen there: the same certificate, and the same tokens as
a bearer header (any right is enough). Connections that send nothing take a bounded number of threads, for a bounded
time.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from dataplane.core.errors import BadRequestError, OverloadedError, UnauthenticatedError
from dataplane.core.timers import TIMERS
from dataplane.core.token_file import TokenFile
from dataplane.server.auth import Security, bearer, host_in_uri
from dataplane.server.call_limits import Slots

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

REQUEST_TIMEOUT_S = 10.0
MAX_REQUESTS = 32

log = logging.getLogger(__name__)


class MetricsServer:
    """The HTTP server for metrics. It serves from its own threads, from construction until `close`."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, security: Security, tokens: TokenFile | None
    ) -> None:
        try:
            app = make_wsgi_app(registry)
            guarded = _with_token(app, tokens) if tokens is not None else app
            self._server = make_server(host, port, guarded, _Server6 if ":" in host else _Server, _Silent)
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


class _Server(ThreadingWSGIServer):
    """The server of prometheus_client, with a limit on its threads and on the time of a request."""

    block_on_close = False
    request_queue_size = 128  # with socketserver's 5, a burst of connections waits seconds for the kernel's next try

    def __init__(self, *args: Any) -> None:
        self.slots = Slots(MAX_REQUESTS, "requests for metrics", "rate of scraping")
        super().__init__(*args)

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
            with TIMERS.limit(time.monotonic() + REQUEST_TIMEOUT_S, partial(_cut, request)):
                super().process_request_thread(request, client_address)
        finally:
            self.slots.give_back()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore broken connections and failed handshakes, because they are the client's faults."""
        log.debug("a request for metrics from %s broke", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    """Logs requests for debugging only."""

    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


def _with_token(app: "WSGIApplication", tokens: TokenFile) -> "WSGIApplication":
    """Return the application behind a check of the bearer token."""

    def checked(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        found = environ.get("HTTP_AUTHORIZATION")
        try:
            tokens.right_of(bearer([found] if found is not None else []))
        except UnauthenticatedError as error:
            headers = [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain; charset=utf-8")]
            start_response("401 Unauthorized", headers)
            return [f"{error}\n".encode()]
        return app(environ, start_response)

    return checked


def _cut(request: socket.socket) -> None:
    """End a connection whose time is over. The thread that reads from the connection then gets the end of the
    stream."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(request, socket.SHUT_RDWR)  # of the socket, because TLS would wait for the client
