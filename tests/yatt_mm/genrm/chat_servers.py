"""A server of chat completions for tests, in a thread of the test's process: the test says what it replies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Reply = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
DEADLINE_S = 30.0


class ChatServer:
    """The server. `reply` may be changed at any time. `stop` ends it, and `start` begins again on the same port, which
    no other process gets in the meantime."""

    def __init__(self, reply: Reply, tls: ssl.SSLContext | None = None) -> None:
        self.reply = reply
        self._tls = tls
        self.asked: list[dict[str, Any]] = []
        """The bodies of all requests."""
        self.keys: list[str | None] = []
        """The header with the key of each request."""
        self.models: list[str] = []
        """The names that GET /models gives; without any it has no such path."""
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = self._reserved.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        self._do(self._start())

    def stop(self) -> None:
        """Close the port, and break off the requests under way."""
        self._do(self._stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()
        self._reserved.close()

    def _do(self, way: Any) -> None:
        asyncio.run_coroutine_threadsafe(way, self._loop).result(DEADLINE_S)

    async def _start(self) -> None:
        application = web.Application(client_max_size=2**24)
        application.router.add_post("/v1/chat/completions", self._reply)
        application.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(application, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls, reuse_address=True).start()

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization"))
        body = await request.json()
        self.asked.append(body)
        with contextlib.suppress(ConnectionError):  # the client may close the connection first
            return await self.reply(request, body)
        return web.Response()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if not self.models:
            raise web.HTTPNotFound
        return web.json_response({"data": [{"id": name} for name in self.models]})


@contextmanager
def serving(reply: Reply, tls: ssl.SSLContext | None = None) -> Iterator[ChatServer]:
    """Run a server in a `with` block. `tls`: what an https server shows."""
    server = ChatServer(reply, tls)
    try:
        server.start()
        yield server
    finally:
        server.close()


def verdict(yes: float = 0.75) -> web.Response:
    """Return a reply that says yes with this probability, with log-probabilities and in words."""
    tops = [{"token": "yes", "logprob": math.log(yes)}, {"token": "no", "logprob": math.log(1 - yes)}]
    choice = {"message": {"content": "yes"}, "logprobs": {"content": [{"top_logprobs": tops}]}}
    return web.json_response({"choices": [choice], "usage": {"completion_tokens": 1}})


async def says_yes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return verdict()


def status(number: int, text: str = "", **headers: str) -> Reply:
    """Return what replies with this status."""

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=number, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return reply


def text(body: str) -> Reply:
    """Return what replies with this body and status 200."""

    async def reply(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=body, content_type="application/json")

    return reply


def endless(number: int, part: bytes, *, every_s: float = 0.0) -> Reply:
    """Return what replies with this status and with parts without end."""

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=number)
        await response.prepare(request)
        while True:
            await response.write(part)
            await asyncio.sleep(every_s)

    return reply


async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Never reply."""
    await asyncio.Event().wait()
    raise AssertionError("the wait has no end")


def words_of(body: dict[str, Any]) -> str:
    """Return the text of a question."""
    return str(json.dumps(body["messages"]))
