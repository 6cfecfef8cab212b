"""Tests of a judge whose server goes down, refuses, or repeats its key, with a real HTTP server in this process."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from models.qwen2_5_vl.recipe import patch_recipe
from tests.yatt_mm.genrm.chat_servers import never, serving, words_of
from tests.yatt_mm.genrm.chat_servers import verdict as says
from tests.yatt_mm.rollout import test_judge
from tests.yatt_mm.rollout.conftest import Run
from tests.yatt_mm.rollout.test_judge import make_group, task_for
from tests.yatt_mm.rollout.test_remote_judge import ask, server_at
from yatt_mm.common.errors import RewardError
from yatt_mm.common.tokens import write_secret
from yatt_mm.genrm import server_waits
from yatt_mm.genrm.remote import RemoteJudge
from yatt_mm.genrm.remote_actor import RemoteJudgeActor
from yatt_mm.protocol.genrm import JudgedGroup, JudgeTask
from yatt_mm.protocol.verdicts import YesNo

SPEC = replace(test_judge.SPEC, verdict=YesNo())


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with EmbeddedNode(memory_bytes=64 * 2**20, roots={}, num_workers=1) as node, Client(node.uri) as client:
        yield client


@pytest.fixture(scope="module")
def task(client: Client, tiny_dir: Path) -> JudgeTask:
    return task_for(make_group(client, patch_recipe(tiny_dir), side=168, texts=("3", "7", "9")))


def test_a_servers_key_comes_from_a_file_goes_with_every_request_and_into_no_text(
    client: Client, task: JudgeTask, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "sk-quite-secret"
    file = write_secret(tmp_path / "key", key)
    assert file.stat().st_mode & 0o777 == 0o600

    async def repeats(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        said = request.headers["Authorization"]
        return web.json_response({"choices": [{"message": {"content": f"{said} is the key"}}]})

    with serving(repeats) as heard:
        server = replace(server_at(heard.url), api_key_file=str(file), api_key_env="JUDGE_KEY")
        judged = run(ask(SPEC, client, server, replace(task, keeps_words=True)))
    assert heard.keys == [f"Bearer {key}"] * 3
    assert judged.words == ("Bearer (the key) is the key",) * 3
    assert all(key.encode() not in pickle.dumps(said) for said in (server, judged))
    assert key not in repr(server) + caplog.text


def test_a_wrong_key_ends_the_run_at_once_and_cancels_what_is_under_way(
    client: Client, task: JudgeTask, run: Run
) -> None:
    async def refuses_one(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if " 3 " in words_of(body):
            return web.Response(status=401, text="no such key")
        return await never(request, body)

    async def judge() -> None:
        remote = RemoteJudge(SPEC, server_at(server.url), Reader(client.uri))
        try:
            async with asyncio.timeout(20):
                await remote.judge([task, task])
        finally:
            assert not remote._groups
            await remote.shutdown()

    with serving(refuses_one) as server:
        with pytest.raises(
            RewardError, match=r"reward\.judges\.tiny: http.*/v1: status 401: no such key; it wants a key"
        ):
            run(judge())


def test_a_response_that_the_server_does_not_take_has_no_verdict_and_the_others_have_theirs(
    client: Client, task: JudgeTask, run: Run
) -> None:
    async def takes_short_ones(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if " 3 " in words_of(body):
            return web.Response(status=400, text="too long")
        return says(0.75)

    with serving(takes_short_ones) as server:
        judged = run(ask(replace(SPEC, score_on_failure=0.25), client, server_at(server.url), task))
        assert len(server.asked) == 3, "it would say the same again"
    assert judged.scores == pytest.approx((0.25, 0.75, 0.75))
    assert (judged.num_failed, judged.num_retried) == (1, 0)
    assert judged.fault is not None and judged.fault.what == "status 400: too long"


def test_a_server_that_goes_down_in_the_middle_of_a_step_loses_no_verdict(
    client: Client, tiny_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server breaks off what it was asked, takes no connection until one question was asked three times, and begins
    again. People are told by records that the actor hands to the rendezvous."""
    monkeypatch.setattr(server_waits, "TELL_AFTER_S", 0.5)
    failures = [0]

    def pause_s(num_failed: int) -> float:
        failures.append(num_failed)
        return 0.2

    monkeypatch.setattr(server_waits, "pause_s", pause_s)
    is_down, told = threading.Event(), list[dict[str, Any]]()

    class Records:
        """Stands for the handle of the rendezvous."""

        class put_record:
            @staticmethod
            def remote(record: dict[str, Any]) -> None:
                told.append(record)

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(server.asked) > 10 and not is_down.is_set():
            is_down.set()
            await asyncio.Event().wait()
        return says(0.75)

    groups = [
        make_group(
            client, patch_recipe(tiny_dir), side=56, number=number, texts=tuple(f"{number}{n}" for n in range(8))
        )
        for number in range(4)
    ]

    async def judge() -> list[JudgedGroup | None]:
        actor = RemoteJudgeActor(
            name="judge",
            spec=replace(SPEC, max_attempts=1),
            server=replace(server_at(server.url), max_requests=2),
            dataplane_uri=client.uri,
            num_controllers=1,
            deadline_s=60.0,
            rendezvous=Records,
        )
        await actor.start()
        judging = asyncio.create_task(actor.judge([task_for(group) for group in groups]))
        try:
            async with asyncio.timeout(60):
                await asyncio.to_thread(is_down.wait)
                await asyncio.to_thread(server.stop)
                while (not told or max(failures) < 3) and not judging.done():
                    await asyncio.sleep(0.01)
                assert not judging.done()
                await asyncio.to_thread(server.start)
                return await judging
        finally:
            await actor.shutdown()

    with serving(reply) as server:
        judged = run(judge())
        assert len(server.asked) > 4 * 8, "what was broken off was asked again"
    assert [group and (group.num_failed, group.fault) for group in judged] == [(0, None)] * 4
    assert all(group is not None and group.scores == pytest.approx((0.75,) * 8) for group in judged)
    assert [(record["judge"], record["is_away"]) for record in told] == [("tiny", True), ("tiny", False)]
