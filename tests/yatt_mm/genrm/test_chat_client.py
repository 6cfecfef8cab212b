"""Tests of one request to a judge's server: what each kind of reply means, and what it may cost."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import ssl
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from tests.dataplane.certificates import issue
from tests.yatt_mm.genrm import chat_servers
from tests.yatt_mm.genrm.chat_servers import ChatServer, Reply, endless, never, says_yes, serving, status
from yatt_mm.genrm.chat_client import (
    MAX_REPLY_BYTES,
    ChatClient,
    ServerAwayError,
    ServerRefusesError,
    UnusableReplyError,
    retry_after_s,
)
from yatt_mm.genrm.chat_form import MAX_READ_CHARS, read_reply
from yatt_mm.protocol.genrm import JudgeSpec, RemoteSpec
from yatt_mm.protocol.verdicts import JsonScore, RegexScore

T = TypeVar("T")
KEY = 'sk-a/very+"secret\\key'
"""It stands in JSON in another form than in a text."""
SOCKET_BYTES = 16 * 2**20
"""The most bytes that the kernel takes from a sender before the receiver reads them."""


def server_at(url: str, **settings: Any) -> RemoteSpec:
    limits = {"deadline_s": 20.0, "max_outage_s": 20.0, "max_requests": 8, "call_timeout_s": 60.0}
    return RemoteSpec(url=url, model="tiny", **{**limits, **settings})


def ask(server: ChatServer, *, api_key: str | None = None, **settings: Any) -> str:
    """Send one request and return the reply."""

    async def asked() -> str:
        client = ChatClient("away", server_at(server.url, **settings), api_key=api_key)
        try:
            return await client.chat({"messages": []})
        finally:
            await client.close()

    return run(asked())


def run(way: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(way, 60))


@pytest.mark.parametrize("number", [400, 413, 422])
def test_what_a_server_says_about_one_request_is_final_and_of_this_request_alone(number: int) -> None:
    with serving(status(number, "too long")) as server, pytest.raises(UnusableReplyError) as caught:
        ask(server)
    assert str(caught.value) == f"status {number}: too long"
    assert caught.value.is_final


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (401, "it wants a key: put it into an environment variable and name that in reward.judges.away.api_key_env"),
        (403, "it wants a key"),
        (404, "correct reward.judges.away.model, or reward.judges.away.url"),
        (405, "correct reward.judges.away.url: it must be that of a server for OpenAI's chat completions"),
        (410, "correct reward.judges.away.url"),
        (204, "correct reward.judges.away.url"),
    ],
)
def test_what_every_request_would_meet_is_refused_with_what_to_change(number: int, change: str) -> None:
    with serving(status(number, "" if number == 204 else "no")) as server, pytest.raises(ServerRefusesError) as caught:
        ask(server)
    assert caught.value.found == (f"status {number}" if number == 204 else f"status {number}: no")
    assert caught.value.change.startswith(change)


def test_a_wrong_key_is_named_by_its_variable() -> None:
    with serving(status(401)) as server, pytest.raises(ServerRefusesError, match="give the environment variable JKEY"):
        ask(server, api_key="wrong", api_key_env="JKEY")


def test_a_redirect_is_not_followed() -> None:
    with serving(says_yes) as other, serving(status(307, Location=f"{other.url}/chat/completions")) as server:
        with pytest.raises(ServerRefusesError, match=f"status 307, which leads to {other.url}"):
            ask(server, api_key=KEY)
        assert other.asked == []


@pytest.mark.parametrize("number", [408, 425, 429, 500, 502, 503, 504, 529])
def test_what_may_pass_is_to_be_asked_again(number: int) -> None:
    with serving(status(number, "busy", Retry_After="7")) as server, pytest.raises(ServerAwayError) as caught:
        ask(server)
    assert str(caught.value) == f"status {number}: busy"
    assert caught.value.retry_after_s == 7
    assert caught.value.may_be_request == (number == 500)


def test_a_server_that_is_not_there_or_hangs_or_breaks_off_is_away() -> None:
    async def breaks_off(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    with serving(never) as server:
        with pytest.raises(ServerAwayError, match=r"no reply within 0\.3 s") as caught:
            ask(server, deadline_s=0.3)
        assert caught.value.may_be_request
        server.reply = breaks_off
        with pytest.raises(ServerAwayError, match="ServerDisconnectedError"):
            ask(server)
        server.stop()
        with pytest.raises(ServerAwayError, match="ClientConnectorError: Cannot connect to host"):
            ask(server)


def test_a_date_or_a_number_says_when_to_ask_again_and_nonsense_says_nothing() -> None:
    now = datetime(2026, 11, 27, 12, 0, tzinfo=UTC)
    date = format_datetime(now + timedelta(seconds=90), usegmt=True)
    dates = {date: 90.0, date.replace("GMT", "-0000"): 90.0, format_datetime(now - timedelta(days=1), usegmt=True): 0}
    numbers = {"12": 12.0, " 3 ": 3.0, "0": 0.0, "9" * 5000: 86400.0}
    for header, wanted in {**dates, **numbers, "": 0, "soon": 0, "-5": 0, "1e3": 0, "Fri, 99 Nov 2026": 0}.items():
        assert retry_after_s(header, now=now) == wanted, header


def counted(number: int, sent: list[int]) -> Reply:
    """Return what replies with this status and a body without end, and counts its bytes."""
    part = bytes(2**16)

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=number)
        await response.prepare(request)
        while True:
            await response.write(part)
            sent[0] += len(part)

    return reply


def test_a_reply_without_end_is_given_up_when_it_is_too_long() -> None:
    sent = [0]
    with serving(counted(200, sent)) as server:
        with pytest.raises(UnusableReplyError, match=f"its reply is longer than {MAX_REPLY_BYTES} bytes") as caught:
            ask(server)
    assert not caught.value.is_final
    assert MAX_REPLY_BYTES <= sent[0] + 2**16 <= MAX_REPLY_BYTES + SOCKET_BYTES


def test_the_body_of_an_error_costs_little_memory_and_time() -> None:
    sent = [0]
    with serving(counted(503, sent)) as server:
        with pytest.raises(ServerAwayError, match="status 503: "):
            ask(server)
        assert sent[0] <= SOCKET_BYTES
        server.reply = endless(401, b"no", every_s=0.05)
        began = time.monotonic()
        with pytest.raises(ServerRefusesError, match="status 401: no"):
            ask(server, deadline_s=0.5)
        assert time.monotonic() - began < 5


def test_a_reply_that_comes_in_drops_ends_at_the_deadline() -> None:
    with serving(endless(200, b" ", every_s=0.05)) as server:
        with pytest.raises(ServerAwayError, match=r"no reply within 0\.5 s"):
            ask(server, deadline_s=0.5)


def test_another_timeout_that_ends_at_the_same_moment_ends_the_wait_too() -> None:
    async def asked(url: str) -> None:
        client = ChatClient("away", server_at(url, deadline_s=0.5))
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    for _ in range(3):
                        with contextlib.suppress(ServerAwayError):
                            await client.chat({"messages": []})
                            await asyncio.sleep(0)
        finally:
            await client.close()

    with serving(never) as server:
        run(asked(server.url))


def test_a_compressed_reply_is_neither_asked_for_nor_unpacked() -> None:
    encodings: list[str | None] = []

    async def bomb(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        encodings.append(request.headers.get("Accept-Encoding"))
        packed = gzip.compress(b"unpacked" + bytes(2**24))
        return web.Response(status=number, body=packed, headers={"Content-Encoding": "gzip"})

    number = 200
    with serving(bomb) as server:
        with pytest.raises(UnusableReplyError, match=r"its reply is compressed \(gzip\)"):
            ask(server)
        number = 401
        with pytest.raises(ServerRefusesError) as caught:
            ask(server)
    assert "unpacked" not in str(caught.value)
    assert encodings == ["identity"] * 2


def test_a_server_whose_certificate_is_not_trusted_is_refused(tmp_path: Path) -> None:
    own = issue(tmp_path, "server", issue(tmp_path, "authority"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(own.cert_file, own.key_file)
    with (
        serving(says_yes, tls=tls) as server,
        pytest.raises(ServerRefusesError, match="certificate verify failed") as caught,
    ):
        ask(server, api_key=KEY)
    assert caught.value.change.endswith("or name the file with the issuer's certificate in SSL_CERT_FILE")
    assert server.asked == []


@pytest.mark.parametrize("form", [str, json.dumps])
def test_the_key_is_sent_and_stands_in_no_error(form: Callable[[str], str]) -> None:
    async def repeats(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=401, text=form(f"{'x' * 100} wrong: {request.headers['Authorization']}"))

    with serving(repeats) as server:
        with pytest.raises(ServerRefusesError, match=r"wrong: Bearer \(the key\)") as caught:
            ask(server, api_key=KEY)
    assert server.keys == [f"Bearer {KEY}"]
    for said in (str(caught.value), repr(caught.value)):
        assert KEY not in said and json.dumps(KEY)[1:-1] not in said and KEY[:8] not in said


@pytest.mark.parametrize("verdict", [JsonScore(), RegexScore(pattern=r"(\d)", scale=10.0)])
def test_a_verdict_is_looked_for_at_the_end_of_a_long_text_and_takes_little_time(
    verdict: JsonScore | RegexScore,
) -> None:
    """The search for objects takes 90 s in 400,000 characters of this form."""
    spec = JudgeSpec(name="away", verdict=verdict)
    said = '{"score": 1}' + "{" * 400_000
    body = json.dumps({"choices": [{"message": {"content": said}}]})
    began = time.monotonic()
    assert read_reply(spec, body).score is None
    assert time.monotonic() - began < 20
    at_end = json.dumps({"choices": [{"message": {"content": f"{'x' * MAX_READ_CHARS} " + '{"score": 1}'}}]})
    assert read_reply(spec, at_end).score is not None


def test_a_reply_of_the_test_server_is_a_verdict() -> None:
    with serving(says_yes) as server:
        assert read_reply(JudgeSpec(name="away"), ask(server)).score == pytest.approx(0.75)
        assert chat_servers.words_of(server.asked[0]) == "[]"
