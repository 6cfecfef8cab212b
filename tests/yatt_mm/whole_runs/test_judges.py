"""Tests a run in bfloat16 with a rule, a classifier and a judge's server, in turns with the policy on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from tests.yatt_mm import runs
from tests.yatt_mm.genrm.chat_servers import ChatServer, serving, verdict
from tests.yatt_mm.rollout.classifiers import build_classifier
from yatt_mm.keeper.table import read_rows, table_path

pytestmark = pytest.mark.alone

NUM_PROMPTS, GROUP_SIZE, NUM_JUDGES = 8, 4, 2
KEY = "sk-" + "only-for-this-test"
"""The key of the judge's server."""
shown_in_titles: list[bytes] = []
"""The command lines of processes with the key."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judged")
    runs.write_shard(path / "train-000000.tar", range(40))
    runs.write_shard(path / "eval-000000.tar", range(1000, 1012))
    return path


@pytest.fixture(scope="module")
def gone() -> Iterator[ChatServer]:
    """A server that gives one verdict, which the start asks for, and is busy from then on. It repeats the key."""

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(server.asked) == 1:
            return verdict()
        shown_in_titles.extend(title for title in titles() if KEY.encode() in title)
        return web.Response(status=503, text=f"busy: {request.headers['Authorization']}")

    with serving(reply) as server:
        yield server


@pytest.fixture(scope="module")
def judged(folder: Path, tiny_dir: Path, gone: ChatServer) -> Iterator[runs.Finished]:
    """A run whose rounds end without their slowest responses; the next step begins with them."""
    overrides = (
        "train.steps=2",
        "model.dtype=bfloat16",
        "placement.num_devices=1",
        "rollout.num_engines=1",
        "rollout.deterministic=false",
        "rollout.max_groups_per_engine=2",
        "sampling.over_dispatch=1.5",
        "rollouts.keep=all",
        "ray.env.VLLM_LOGGING_LEVEL=INFO",
        "sampling.tail=continue",
        "reward.weight=0.25",
        f"reward.judges.head.model={build_classifier(tiny_dir, folder / 'classifier')}",
        "reward.judges.head.verdict=classifier",
        "reward.judges.head.weight=0.1",
        "reward.judges.head.kv_cache_memory=64MiB",
        "reward.judges.head.max_model_len=256",
        "reward.max_failed_frac=1",
        f"reward.judges.away.url={gone.url}",
        "reward.judges.away.model=judge",
        "reward.judges.away.api_key_env=YATT_TEST_JUDGE_KEY",
        "reward.judges.away.max_outage_s=4",
        "reward.judges.away.weight=0.5",
        "reward.judges.away.max_attempts=1",
        "reward.judges.away.score_on_failure=0.5",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YATT_TEST_JUDGE_KEY", KEY)
        run = runs.run(runs.arguments(folder, tiny_dir, "judged", *overrides))
    assert "judge away gave no verdict in 2 steps, so each response scored" in run.output, run.output
    assert run.status == 1, "a judge that is never there makes a run fail at its end"
    yield run


def titles() -> Iterator[bytes]:
    """Yield the command line of every process."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_bytes()


def test_a_server_that_is_away_is_told_and_its_key_stands_in_no_file_of_the_run(
    judged: runs.Finished, folder: Path, gone: ChatServer
) -> None:
    assert set(gone.keys) == {f"Bearer {KEY}"}
    (told,) = (line for line in judged.output.splitlines() if line.startswith("waiting: "))
    assert f"the server of judge away at {gone.url} gives no reply (status 503: busy: Bearer (the key))" in told
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(b"YATT_TEST_JUDGE_KEY" in path.read_bytes() for path in files), "the config names the variable"
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in judged.output
    assert shown_in_titles == []


def test_their_scores_add_up_by_weight_and_they_see_what_was_processed_for_the_policy(
    judged: runs.Finished, folder: Path, gone: ChatServer
) -> None:
    assert judged.left_behind == []
    (told,) = (line for line in judged.output.splitlines() if "reward.judges.away failed on" in line)
    assert "which score 0.5 (reward.judges.away.score_on_failure)" in told
    assert f"(judge at {gone.url})" in told
    for record in runs.metrics(folder, "judged")[1:]:
        assert record["genrm/num_failed"] == record["genrm/num_judged"] / NUM_JUDGES, "those of the judge that is away"
        assert record["genrm/head_mean"] != 0
        by_weight = {"reward/function_mean": 0.25, "genrm/head_mean": 0.1, "genrm/away_mean": 0.5}
        assert record["reward/mean"] == pytest.approx(sum(record[key] * weight for key, weight in by_weight.items()))
        assert record["time/genrm_s"] > 0
        assert record["genrm/bytes_moved"] > 0
        assert record["dataplane/num_processed"] == record["dataplane/num_media"]


def test_in_bfloat16_the_engine_and_the_trainer_differ_by_what_it_rounds(judged: runs.Finished, folder: Path) -> None:
    assert judged.left_behind == []
    for record in runs.metrics(folder, "judged")[1:]:
        assert 0 < record["rollout/logprob_diff_mean"] < 0.02
        assert record["train/grad_norm"] > 0
    for engine in ("engine-0", "judge-head-0"):
        assert "dtype=torch.bfloat16" in (folder / "runs" / "judged" / "logs" / f"{engine}.log").read_text(), "by vLLM"
    exported = load_file(folder / "runs" / "judged" / "hf" / "model.safetensors")
    assert all(torch.equal(tensor, tensor.bfloat16().to(tensor.dtype)) for tensor in exported.values())


def test_the_scores_of_every_judge_are_kept(judged: runs.Finished, folder: Path) -> None:
    weights = {"function": 0.25, "judges.head": 0.1, "judges.away": 0.5}
    for step in (1, 2):
        rows = [row for row in read_rows(table_path(folder / "runs" / "judged", step)) if row["split"] == "train"]
        assert len({row["position"] for row in rows}) >= 2
        for row in rows:
            assert [scored["source"] for scored in row["scores"]] == [f"reward.{name}" for name in weights]
            total = sum(scored["score"] * weight for scored, weight in zip(row["scores"], weights.values()))
            assert row["reward"] == pytest.approx(total)
            assert [scored["words"] for scored in row["scores"]] == [None, "", ""], "none of them speaks"


def test_a_round_ends_without_its_slowest_responses_and_the_next_step_begins_with_them(
    judged: runs.Finished, folder: Path
) -> None:
    for record in runs.metrics(folder, "judged")[1:]:
        assert record["sampling/num_groups"] == NUM_PROMPTS
        assert record["sampling/num_carried"] > 0
        num_judged = record["genrm/num_judged"] / GROUP_SIZE / NUM_JUDGES
        assert NUM_PROMPTS <= num_judged <= record["sampling/num_prompts_used"] - record["sampling/num_carried"]
    _, first, second = runs.metrics(folder, "judged")
    rows = read_rows(table_path(folder / "runs" / "judged", second["step"]))
    positions = {row["position"] for row in rows if row["split"] == "train"}
    begun_before = {position for position in positions if position < first["sampling/num_prompts_used"]}
    assert 0 < len(begun_before) <= first["sampling/num_carried"]
