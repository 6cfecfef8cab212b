"""Tests of the waits for a judge's server that is away, with a real server that ends and begins again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from tests.yatt_mm.genrm.chat_servers import ChatServer, never, says_yes, serving, status
from tests.yatt_mm.genrm.test_chat_client import run, server_at
from yatt_mm.genrm import server_waits
from yatt_mm.genrm.chat_client import ChatClient, ServerRefusesError
from yatt_mm.genrm.server_waits import LONGEST_PAUSE_S, Asked, GaveUpError, ServerWaits, ServerWatch, pause_s

Question = Callable[[str], Awaitable[Asked]]


def waited(
    server: ChatServer, scene: Callable[[Question], Awaitable[Any]], *, max_attempts: int = 2, **settings: Any
) -> list[dict[str, Any]]:
    """Run a scene, which gets a function that asks a question. Return the records that were told."""
    told: list[dict[str, Any]] = []

    async def play() -> None:
        spec = server_at(server.url, **settings)
        client = ChatClient("away", spec)
        waits = ServerWaits("away", spec, client, max_attempts=max_attempts, tell=told.append)

        async def ask(words: str) -> Asked:
            asked = Asked()
            await waits.ask({"messages": [words]}, asked)
            return asked

        try:
            await scene(ask)
        finally:
            await client.close()

    run(play())
    return told


@pytest.fixture
def tells_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_waits, "TELL_AFTER_S", 0.5)


@pytest.mark.usefixtures("tells_soon")
def test_a_server_that_goes_down_and_comes_back_is_waited_for_and_told_twice(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(ask: Question) -> None:
        assert (await ask("before")).num_requests == 1
        await asyncio.to_thread(server.stop)
        asking = [asyncio.create_task(ask(f"during {n}")) for n in range(5)]
        async with asyncio.timeout(20):
            while "gives no reply" not in caplog.text:
                await asyncio.sleep(0.01)
        assert not any(task.done() for task in asking)
        await asyncio.to_thread(server.start)
        assert all(asked.num_requests > 1 for asked in await asyncio.gather(*asking))

    with serving(says_yes) as server:
        away, back = waited(server, scene, max_attempts=1)
        url = server.url
    assert (away["kind"], away["judge"], away["is_away"], back["is_away"]) == ("server", "away", True, False)
    assert away["text"].startswith(f"the server of judge away at {url} gives no reply (ClientConnectorError: ")
    assert away["text"].endswith("waited for up to 20 s (reward.judges.away.max_outage_s)")
    assert "replies again, after" in back["text"]
    assert back["text"] in caplog.text, "the judge's own log has it too"


def test_a_short_failure_is_not_told() -> None:
    async def scene(ask: Question) -> None:
        assert (await ask("")).num_requests == 2

    with serving(says_yes) as server:
        server.reply = once(status(503), says_yes)
        assert waited(server, scene) == []


def test_many_questions_that_wait_for_the_same_server_tell_of_it_once() -> None:
    told: list[dict[str, Any]] = []
    watch = ServerWatch("away", server_at("http://host/v1"), told.append)
    for outage in (1, 2):
        sent_s = time.monotonic()
        for seconds in (1.0, 5.0, 6.0, 20.0):
            watch.note_failure(sent_s=sent_s)
            watch.tell_if_away("busy", until_s=sent_s + seconds)
        watch.note_reply()
        watch.note_reply()
        assert [record["is_away"] for record in told] == [True, False] * outage


@pytest.mark.usefixtures("tells_soon")
def test_a_server_says_how_long_it_wants_to_be_left_alone() -> None:
    async def scene(ask: Question) -> None:
        began = time.monotonic()
        assert (await ask("")).num_requests == 2
        assert time.monotonic() - began >= 2

    with serving(says_yes) as server:
        server.reply = once(status(429, "too many", Retry_After="2"), says_yes)
        away, _ = waited(server, scene)
    assert "(status 429: too many)" in away["text"], "told at once, because the wait is long"


def test_the_wait_ends_with_the_longest_outage_however_long_the_server_asks_for() -> None:
    async def scene(ask: Question) -> None:
        began = time.monotonic()
        with pytest.raises(GaveUpError, match=r"status 503: down; the server was away for 1 s"):
            await ask("first")
        assert 1 <= time.monotonic() - began < 10
        num_before = len(server.asked)
        with pytest.raises(GaveUpError):
            await ask("later")
        assert len(server.asked) == num_before + 1, "the outage is as long as before"
        server.reply = says_yes
        assert (await ask("at last")).num_requests == 1

    with serving(status(503, "down", Retry_After="3600")) as server:
        waited(server, scene, max_outage_s=1.0)


@pytest.mark.parametrize(
    ("bad", "deadline_s", "why"),
    [(never, 4.0, "no reply within 4 s"), (status(500, "it hurts"), 20.0, "status 500: it hurts")],
)
def test_one_question_to_which_alone_there_is_no_reply_is_given_up(bad: Any, deadline_s: float, why: str) -> None:
    async def scene(ask: Question) -> None:
        async def others() -> None:
            while True:
                await ask("good")
                await asyncio.sleep(0.01)

        busy = asyncio.create_task(others())
        with pytest.raises(GaveUpError, match=f"{why}, although the server replied to other requests"):
            await ask("bad")
        busy.cancel()

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["messages"] != ["bad"]:
            return await says_yes(request, body)
        num_asked = len(server.asked)
        while len(server.asked) < num_asked + 2:  # the first of the two has its reply when the second comes
            await asyncio.sleep(0.01)
        response: web.StreamResponse = await bad(request, body)
        return response

    with serving(reply) as server:
        assert waited(server, scene, deadline_s=deadline_s) == []
        assert sum(body["messages"] == ["bad"] for body in server.asked) == 2


def test_a_refusal_ends_the_wait_at_once() -> None:
    async def scene(ask: Question) -> None:
        with pytest.raises(ServerRefusesError, match="status 401"):
            await ask("")

    with serving(says_yes) as server:
        server.reply = once(status(503), status(401))
        waited(server, scene)
        assert len(server.asked) == 2


def test_waits_grow_and_differ() -> None:
    for num_failed, longest_s in ((1, 0.5), (2, 1.0), (3, 2.0), (10, LONGEST_PAUSE_S), (10**6, LONGEST_PAUSE_S)):
        drawn = [pause_s(num_failed) for _ in range(200)]
        assert longest_s / 2 <= min(drawn) < 0.6 * longest_s
        assert 0.9 * longest_s < max(drawn) <= longest_s


def once(first: Any, then: Any) -> Any:
    """Return what replies in one way to the first request, and in another way to all others."""
    left = [first]

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response: web.StreamResponse = await (left.pop() if left else then)(request, body)
        return response

    return reply
