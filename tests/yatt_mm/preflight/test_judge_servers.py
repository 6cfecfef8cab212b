"""Tests that the servers of judges are asked before a run starts, and that what is wrong with one is named then."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.yatt_mm import runs
from tests.yatt_mm.genrm.chat_servers import Reply, never, says_yes, serving, status, text
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.preflight.judge_servers import check_judge_servers, open_keys

KEY = "sk-a-very-secret-key"


def config_of(url: str, *settings: str) -> Config:
    """Return the config of a run with a judge `away` on a server, and a judge `own` in an engine of the run."""
    judge = (f"url={url}", "model=big", *settings)
    path, *overrides = runs.arguments(Path("unused"), Path("unused"), "judged", "train.steps=1")
    own = "reward.judges.own.model=some/folder"
    return load_config(runs.ROOT / path, [*overrides, *(f"reward.judges.away.{one}" for one in judge), own])


def refusal(url: str, *settings: str, budget_s: float = 20.0) -> str:
    with pytest.raises(ConfigError) as caught:
        check_judge_servers(config_of(url, *settings), budget_s=budget_s)
    return str(caught.value)


@pytest.mark.parametrize("settings", [(), ("verdict=json",), ("verdict=regex", "max_tokens=500")])
def test_a_server_that_can_judge_is_asked_once_with_the_model_and_a_small_question(settings: tuple[str, ...]) -> None:
    with serving(says_yes) as server:
        check_judge_servers(config_of(server.url, *settings))
    (asked,) = server.asked
    assert (asked["model"], asked["max_tokens"]) == ("big", 1)
    assert asked.get("logprobs", False) == (settings == ())


def test_a_run_without_such_a_judge_asks_no_server() -> None:
    path, *overrides = runs.arguments(Path("unused"), Path("unused"), "judged", "train.steps=1")
    check_judge_servers(load_config(runs.ROOT / path, overrides))


def test_a_server_that_is_not_there_is_refused_when_the_time_is_used_up() -> None:
    with serving(says_yes) as server:
        server.stop()
        began = time.monotonic()
        said = refusal(server.url, budget_s=1.0)
        assert 1.0 <= time.monotonic() - began < 10
        assert said.startswith(
            f"reward.judges.away: model big at {server.url} gave no reply in 1 s: ClientConnectorError"
        )
        assert said.endswith("start the server, or correct reward.judges.away.url")


@pytest.mark.parametrize(
    ("reply", "found"), [(never, "gave no reply in 1 s"), (status(503, "loading"), "in 1 s: status 503: loading")]
)
def test_a_server_that_does_not_reply_is_refused(reply: Reply, found: str) -> None:
    with serving(reply) as server:
        assert found in refusal(server.url, budget_s=1.0)


def test_a_server_that_is_busy_for_a_moment_is_asked_again() -> None:
    async def busy_once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        server.reply = says_yes
        return web.Response(status=429)

    with serving(busy_once) as server:
        check_judge_servers(config_of(server.url))
    assert len(server.asked) == 2


def test_a_key_that_the_server_refuses_is_named_by_its_variable_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(status(401, f"no such key: {KEY}")) as server:
        said = refusal(server.url, "api_key_env=JUDGE_KEY")
        assert server.keys == [f"Bearer {KEY}"]
        assert "cannot judge: status 401: no such key: (the key); give the environment variable JUDGE_KEY" in said
        assert KEY not in said
        assert "it wants a key: put it into an environment variable" in refusal(server.url)


def test_a_model_that_the_server_does_not_have_is_refused_with_those_that_it_has() -> None:
    with serving(status(404, "no model big")) as server:
        server.models = ["tiny", "small"]
        said = refusal(server.url)
        assert "cannot judge: status 404: no model big (it has tiny, small); correct reward.judges.away.model" in said
        assert "cannot judge: status 404" in refusal(server.url.removesuffix("/v1"))


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (text("<html>welcome</html>"), "replies with something else than a chat completion: "),
        (text('{"choices": []}'), "replies with something else than a chat completion: "),
        (
            status(405),
            "cannot judge: status 405; correct reward.judges.away.url: it must be that of a server for OpenAI's",
        ),
        (
            status(307, Location="http://elsewhere/"),
            "cannot judge: status 307, which leads to http://elsewhere/; correct",
        ),
        (status(400, "no logprobs here"), "refuses a small question: status 400: no logprobs here"),
        (
            text(json.dumps({"choices": [{"message": {"content": "yes"}}]})),
            "gives no log-probabilities of its first token, which verdict yes_no reads; read the verdict with "
            "reward.judges.away.verdict regex or json",
        ),
    ],
)
def test_a_server_that_could_give_no_verdict_is_refused(reply: Reply, found: str) -> None:
    with serving(reply) as server:
        assert found in refusal(server.url)
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("url", "is_told"),
    [
        ("http://judge-host:8000/v1", True),
        ("http://10.0.0.1/v1", True),
        ("https://judge-host/v1", False),
        ("http://localhost:8000/v1", False),
        ("http://127.0.0.5:8000/v1", False),
        ("http://[::1]:8000/v1", False),
    ],
)
def test_a_key_that_leaves_the_machine_without_encryption_is_told(url: str, is_told: bool) -> None:
    told = list(open_keys(config_of(url, "api_key_env=JUDGE_KEY")))
    assert len(told) == is_told
    assert all(f"{url} is not encrypted" in one and "JUDGE_KEY" in one and "https://" in one for one in told)
    assert list(open_keys(config_of(url))) == []
