"""Tests a run of three controllers in bfloat16 on a mixture of sets in the layouts of other projects, of samples with
two images or a video. A rule, a classifier and a judge's server score the responses, in turns with the policy. The
pixels pass through the run, and no controller grows. The vision tower is frozen."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from PIL import Image
from safetensors.torch import load_file

from dataplane.core.digests import content_digest
from tests.yatt_mm import runs
from tests.yatt_mm.genrm.chat_servers import ChatServer, serving, verdict
from tests.yatt_mm.rollout.classifiers import build_classifier
from tests.yatt_mm.whole_runs import mixture
from tests.yatt_mm.whole_runs.mixture import (
    LARGE,
    NUM_EVAL,
    NUM_FRAMES,
    NUM_MEDIA,
    NUM_PROMPTS,
    NUM_STEPS,
    QUESTION,
    SETS,
    SIDE,
)
from yatt_mm.keeper.table import Row, read_rows, table_path

pytestmark = pytest.mark.alone

NUM_CONTROLLERS, GROUP_SIZE, NUM_JUDGES = 3, 2, 2
CLIPS = {"num_samples": 4, "temperature": 1.0, "metrics": ["mean@2", "pass@2", "maj@4"], "num_prompts": NUM_EVAL - 1}
WEIGHTS = {"function": 0.25, "judges.head": 0.1, "judges.away": 0.5}
MIB = 2**20
KEY = "sk-" + "only-for-this-test"
"""The key of the judge's server."""
shown_in_titles: list[bytes] = []
"""The command lines of processes with the key."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media")
    mixture.make(path)
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
def run(folder: Path, gone: ChatServer) -> runs.Finished:
    endings = {"verl": "parquet", "llava": "json", "swift": "jsonl"}
    sets = [{"name": name, "path": f"{folder}/{name}.{endings[name]}", "weight": num} for name, num in SETS.items()]
    overrides = (
        f"data.train={json.dumps(sets)}",
        f"data.eval={folder}/eval.json",
        f"eval.sets.clips={json.dumps(CLIPS | {'path': f'{folder}/eval.json'})}",
        "rollouts.keep=all",
        "train.freeze=[tower]",
        "algorithm.kl.where=loss",
        "reference.renew_every=2",
        f"controllers.num={NUM_CONTROLLERS}",
        f"train.steps={NUM_STEPS}",
        f"train.prompts_per_step={NUM_PROMPTS}",
        f"rollout.group_size={GROUP_SIZE}",
        "sampling.replace_groups=false",
        "rollout.max_images_per_prompt=2",
        "rollout.max_videos_per_prompt=1",
        "rollout.max_model_len=512",
        "data.video.fps=4",
        f"data.filter.max_pixels={SIDE * SIDE}",
        "data.filter.max_prompt_tokens=340",  # no prompt has more, but more bytes: controllers count the tokens
        "dataplane.memory=256MiB",
        "eval.every=3",
        "checkpoint.every=0",
        "placement.num_devices=1",
        "rollout.num_engines=1",
        "rollout.deterministic=false",
        "model.dtype=bfloat16",
        "ray.env.VLLM_LOGGING_LEVEL=INFO",
        f"reward.weight={WEIGHTS['function']}",
        f"reward.judges.head.model={build_classifier(folder / 'model', folder / 'classifier')}",
        "reward.judges.head.verdict=classifier",
        f"reward.judges.head.weight={WEIGHTS['judges.head']}",
        "reward.judges.head.kv_cache_memory=64MiB",
        "reward.judges.head.max_model_len=512",
        "reward.max_failed_frac=1",
        f"reward.judges.away.url={gone.url}",
        "reward.judges.away.model=judge",
        "reward.judges.away.api_key_env=YATT_TEST_JUDGE_KEY",
        "reward.judges.away.max_outage_s=4",
        f"reward.judges.away.weight={WEIGHTS['judges.away']}",
        "reward.judges.away.max_attempts=1",
        "reward.judges.away.score_on_failure=0.5",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YATT_TEST_JUDGE_KEY", KEY)
        done = runs.run(runs.arguments(folder, folder / "model", "media", *overrides))
    assert f"judge away gave no verdict in {NUM_STEPS} steps, so each response scored" in done.output, done.output
    assert done.status == 1, "a judge that is never there makes a run fail at its end"
    return done


def _kept(folder: Path, step: int, split: str) -> list[Row]:
    """Return what was kept of a split at a step."""
    return [row for row in read_rows(table_path(folder / "runs" / "media", step)) if row["split"] == split]


def test_a_run_on_images_and_videos_trains_on_every_sample_and_leaves_nothing_behind(
    run: runs.Finished, folder: Path
) -> None:
    assert run.left_behind == []
    records = runs.metrics(folder, "media")
    used = dict.fromkeys(SETS, 0)
    for step, record in enumerate(records[1:], 1):
        assert record["sampling/num_groups"] == NUM_PROMPTS
        rows = _kept(folder, step, "train")
        for name, num_samples in SETS.items():
            used[name] += record[f"sets/{name}/num_prompts"]
            assert abs(used[name] - num_samples * step / NUM_STEPS) < 1, "by weight, after every step"
            rewards = [row["reward"] for row in rows if row["set"] == name]
            assert record[f"sets/{name}/reward_mean"] == pytest.approx(np.mean(rewards))
        assert record["train/grad_norm"] > 0
        assert record["rollout/logprob_diff_mean"] < 0.01, "as far as bfloat16 rounds"
    num_media = sum(NUM_MEDIA[name] * num for name, num in {**SETS, "eval": NUM_EVAL}.items()) + NUM_MEDIA["verl"]
    assert records[-1]["dataplane/num_media"] == records[-1]["dataplane/num_processed"] == num_media
    assert records[-1]["dataplane/num_recomputed"] == 0


def test_it_has_as_many_controllers_as_it_is_told(run: runs.Finished, folder: Path) -> None:
    logs = (folder / "runs" / "media" / "logs").glob("controller-*.log")
    assert {log.name for log in logs} == {f"controller-{number}.log" for number in range(NUM_CONTROLLERS)}


def test_the_sample_that_the_filter_leaves_out_is_replaced_and_told(run: runs.Finished, folder: Path) -> None:
    (notice,) = map(json.loads, (folder / "runs" / "media" / "quarantine.jsonl").read_text().splitlines())
    assert (notice["set"], notice["index"], notice["is_filtered"]) == ("verl", LARGE, True)
    assert notice["reason"] == "it has images of 344x344 = 118336 pixels; data.filter.max_pixels is 112896"
    records = runs.metrics(folder, "media")
    assert sum(record.get("data/num_filtered", 0) for record in records) == 1
    assert not any(record.get("data/num_quarantined", 0) for record in records)
    assert "1 sample was left out, 1 of them by data.filter; " in run.output
    rows = itertools.chain.from_iterable(_kept(folder, step, "train") for step in range(1, NUM_STEPS + 1))
    trained = {row["index"] for row in rows if row["set"] == "verl"}
    assert trained == set(range(SETS["verl"] + 1)) - {LARGE}


def test_the_policy_leaves_its_reference_until_it_takes_its_place(run: runs.Finished, folder: Path) -> None:
    first, second, third = (record["train/kl"] for record in runs.metrics(folder, "media")[1:])
    assert 0 < first < second, "they are the same model in the first of the two updates of a step"
    assert third < second / 2, "the policy after step 2 is the reference of step 3"
    renewed = folder / "runs" / "media" / "reference"
    assert [path.name for path in renewed.iterdir()] == ["step_000002"]


def test_the_frozen_tower_stays_as_it_is_and_the_rest_is_trained(run: runs.Finished, folder: Path) -> None:
    before, after = (_weights(path) for path in (folder / "model", folder / "runs" / "media" / "hf"))
    assert before.keys() == after.keys()
    changed = {name for name, weight in before.items() if not torch.equal(weight.bfloat16(), after[name].bfloat16())}
    assert {name for name in changed if "visual" in name} == {name for name in before if "visual.merger" in name}
    assert {name for name in before if "visual" not in name} <= changed


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def test_kept_rollouts_show_the_images_and_videos_of_their_samples(run: runs.Finished, folder: Path) -> None:
    files = {name: mixture.media_of(folder, name) for name in (*SETS, "eval")}
    for step in range(NUM_STEPS + 1):
        for row in read_rows(table_path(folder / "runs" / "media", step)):
            kinds = [medium["kind"] for medium in row["media"]]
            assert kinds == (["video"] if row["set"] in ("llava", "eval", "clips") else ["image", "image"])
            wanted = files["eval" if row["set"] == "clips" else row["set"]][row["index"]]
            assert [medium["source"] for medium in row["media"]] == [content_digest(file) for file in wanted]
            assert QUESTION in row["question"]
            assert row["conversation"].startswith('[{"role": "system"') == (row["set"] == "swift")
            for medium in row["media"]:
                assert 0 < len(medium["thumbnail"]) <= 8192
                width, height = Image.open(io.BytesIO(medium["thumbnail"])).size
                assert width == height * (1 if medium["kind"] == "image" else NUM_FRAMES)


def test_several_samples_of_a_held_out_set_are_measured_as_they_were_kept(run: runs.Finished, folder: Path) -> None:
    for record in [runs.metrics(folder, "media")[0], runs.metrics(folder, "media")[-1]]:
        rows = _kept(folder, record["step"], "eval")
        assert {row["set"] for row in rows} == {"eval", "clips"}
        groups = [[row for row in rows if (row["set"], row["index"]) == ("clips", at)] for at in range(NUM_EVAL - 1)]
        assert [len(group) for group in groups] == [4] * (NUM_EVAL - 1) and record["eval/clips/num_samples"] == 20
        rewards = [[row["reward"] for row in group] for group in groups]
        assert record["eval/clips/accuracy"] == pytest.approx(np.mean(rewards))
        assert record["eval/clips/mean@2"] == pytest.approx(np.mean([group[:2] for group in rewards]))
        pairs = [np.mean([max(pair) for pair in itertools.combinations(group, 2)]) for group in rewards]
        assert record["eval/clips/pass@2"] == pytest.approx(np.mean(pairs))
        texts = [[row["response"].strip() for row in group] for group in groups]
        chosen = [max(said, key=lambda text: (said.count(text), -said.index(text))) for said in texts]
        right = [group[said.index(text)] for group, said, text in zip(rewards, texts, chosen)]
        assert record["eval/clips/maj@4"] == pytest.approx(np.mean(right))
        greedy = [row["reward"] for row in rows if row["set"] == "eval"]
        assert (record["eval/accuracy"], len(greedy)) == (pytest.approx(np.mean(greedy)), NUM_EVAL)


def test_no_controller_grows_while_the_pixels_pass(run: runs.Finished, folder: Path) -> None:
    first, second, *_, last = runs.metrics(folder, "media")
    passed, grown = (
        [last[name] - before[name] for before in (first, second)]
        for name in ("dataplane/processed_bytes", "controller/rss_bytes_max")
    )
    assert passed[0] > 64 * MIB and passed[1] > 32 * MIB
    assert first["controller/rss_bytes_max"] > 32 * MIB, "a process of Python with what a controller imports"
    assert grown[0] < 16 * MIB, "with all that the first step loads"
    assert grown[1] < passed[1] / NUM_CONTROLLERS / 2, "after it: half of what came for this controller"


def titles() -> Iterator[bytes]:
    """Yield the command line of every process."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_bytes()


def test_a_server_that_is_away_is_told_and_its_key_stands_in_no_file_of_the_run(
    run: runs.Finished, folder: Path, gone: ChatServer
) -> None:
    assert set(gone.keys) == {f"Bearer {KEY}"}
    (told,) = (line for line in run.output.splitlines() if line.startswith("waiting: "))
    assert f"the server of judge away at {gone.url} gives no reply (status 503: busy: Bearer (the key))" in told
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(b"YATT_TEST_JUDGE_KEY" in path.read_bytes() for path in files), "the config names the variable"
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in run.output
    assert shown_in_titles == []


def test_scores_add_up_by_weight_and_judges_see_what_was_processed_for_the_policy(
    run: runs.Finished, folder: Path, gone: ChatServer
) -> None:
    assert run.left_behind == []
    (told,) = (line for line in run.output.splitlines() if "reward.judges.away failed on" in line)
    assert "which score 0.5 (reward.judges.away.score_on_failure)" in told
    assert f"(judge at {gone.url})" in told
    for record in runs.metrics(folder, "media")[1:]:
        assert record["genrm/num_judged"] == NUM_PROMPTS * GROUP_SIZE * NUM_JUDGES
        assert record["genrm/num_failed"] == record["genrm/num_judged"] / NUM_JUDGES, "those of the judge that is away"
        assert record["genrm/head_mean"] != 0
        means = (record["reward/function_mean"], record["genrm/head_mean"], record["genrm/away_mean"])
        total = sum(mean * weight for mean, weight in zip(means, WEIGHTS.values(), strict=True))
        assert record["reward/mean"] == pytest.approx(total)
        assert record["time/genrm_s"] > 0
        assert record["genrm/bytes_moved"] > 0
        assert record["dataplane/num_processed"] == record["dataplane/num_media"]


def test_the_engines_and_the_trainer_compute_in_bfloat16(run: runs.Finished, folder: Path) -> None:
    assert run.left_behind == []
    for record in runs.metrics(folder, "media")[1:]:
        assert record["rollout/logprob_diff_mean"] > 1e-4
    for engine in ("engine-0", "judge-head-0"):
        assert "dtype=torch.bfloat16" in (folder / "runs" / "media" / "logs" / f"{engine}.log").read_text(), "by vLLM"
    exported = load_file(folder / "runs" / "media" / "hf" / "model.safetensors")
    assert all(torch.equal(tensor, tensor.bfloat16().to(tensor.dtype)) for tensor in exported.values())


def test_the_scores_of_every_judge_are_kept(run: runs.Finished, folder: Path) -> None:
    for step in range(1, NUM_STEPS + 1):
        rows = _kept(folder, step, "train")
        assert len({row["position"] for row in rows}) == NUM_PROMPTS
        for row in rows:
            assert [scored["source"] for scored in row["scores"]] == [f"reward.{name}" for name in WEIGHTS]
            total = sum(scored["score"] * weight for scored, weight in zip(row["scores"], WEIGHTS.values()))
            assert row["reward"] == pytest.approx(total)
            assert [scored["words"] for scored in row["scores"]] == [None, "", ""], "none of them speaks"
