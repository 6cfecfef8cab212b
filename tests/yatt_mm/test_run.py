"""Tests of whole runs: a real Flight node, Ray, vLLM engines and Megatron ranks on a tiny model and real digits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from tests.dataplane.shards import wait_until
from tests.yatt_mm import runs
from tests.yatt_mm.killing_reward import VARIABLE
from tests.yatt_mm.rollout.classifiers import build_classifier

pytestmark = pytest.mark.alone

REQUIRED_KEYS = {
    "step",
    "reward/mean",
    "rollout/logprob_diff_mean",
    "rollout/logprob_diff_max",
    "rollout/num_tokens",
    "train/released_bytes",
    "train/restored_bytes",
    "train/release_s",
    "train/restore_s",
    "time/step_s",
    "time/rollout_s",
    "time/train_s",
    "time/publish_s",
    "dataplane/num_media",
    "dataplane/num_processed",
    "dataplane/used_bytes",
    "controller/rss_bytes_max",
}
CURVE = ("eval/accuracy", "reward/mean", "train/loss", "train/entropy", "train/grad_norm", "rollout/num_tokens")
NUM_TRAIN, NUM_EVAL, CORRUPT = 40, 12, 20
NUM_PROMPTS = 8
PER_STEP = NUM_PROMPTS * 4
"""The number of responses of a step: prompts times group size."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    runs.write_shard(path / "train-000000.tar", range(NUM_TRAIN), corrupt=(CORRUPT,))
    runs.write_shard(path / "eval-000000.tar", range(1000, 1000 + NUM_EVAL))
    return path


@pytest.fixture(scope="module")
def whole(folder: Path, tiny_dir: Path) -> runs.Finished:
    """A run of six steps without a break, in which every training sample is drawn at least once."""
    return runs.run(runs.arguments(folder, tiny_dir, "whole", "train.steps=6"))


def curve(folder: Path, name: str) -> list[dict[str, float]]:
    return [{key: record[key] for key in CURVE if key in record} for record in runs.metrics(folder, name)]


def test_a_run_ends_well_and_leaves_nothing_behind(whole: runs.Finished) -> None:
    assert whole.status == 0, whole.output
    assert whole.left_behind == []
    assert "held-out accuracy" in whole.output


def test_every_step_has_the_promised_metrics(whole: runs.Finished, folder: Path) -> None:
    records = runs.metrics(folder, "whole")
    assert [record["step"] for record in records] == list(range(7))
    assert [record["step"] for record in records if "eval/accuracy" in record] == [0, 2, 4, 6]
    assert set(records[0]) >= {"step", "eval/accuracy"}
    for record in records[1:]:
        assert set(record) >= REQUIRED_KEYS
        assert record["rollout/logprob_diff_mean"] < 1e-3
        assert record["rollout/logprob_diff_max"] < 1e-2
        assert record["rollout/staleness_max"] == 0
        assert record["rollout/stale_tokens_frac"] == 0
        num_used = record["sampling/num_prompts_used"]
        assert num_used * record["reward/has_signal_frac"] >= NUM_PROMPTS, "the batch is full of groups with signal"
        assert record["sampling/num_rejected"] <= num_used - NUM_PROMPTS
    assert list((folder / "runs" / "whole" / "tensorboard").glob("events.*"))
    assert (folder / "runs" / "whole" / "config.yaml").exists()


def test_the_processor_runs_once_per_image(whole: runs.Finished, folder: Path) -> None:
    last = runs.metrics(folder, "whole")[-1]
    assert last["dataplane/num_media"] == last["dataplane/num_processed"] == NUM_TRAIN - 1 + NUM_EVAL
    assert last["dataplane/num_recomputed"] == 0


def test_a_corrupt_image_is_set_aside_with_its_reason(whole: runs.Finished, folder: Path) -> None:
    lines = (folder / "runs" / "whole" / "quarantine.jsonl").read_text().splitlines()
    (notice,) = (json.loads(line) for line in lines)
    assert notice["key"] == f"{CORRUPT:06d}"
    assert notice["shard"].endswith("train-000000.tar")
    assert notice["reason"]
    assert sum(record.get("data/num_quarantined", 0) for record in runs.metrics(folder, "whole")) == 1


def test_the_exported_folder_loads_in_transformers(whole: runs.Finished, folder: Path, tiny_dir: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText, AutoProcessor

    exported = folder / "runs" / "whole" / "hf"
    AutoProcessor.from_pretrained(exported)
    model = AutoModelForImageTextToText.from_pretrained(exported)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    before, after = load_file(tiny_dir / "model.safetensors"), load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)


def copy_of_run(folder: Path, name: str, step: int) -> str:
    """Copy the whole run under another name, and return the folder of its checkpoint of `step`."""
    copy = folder / "runs" / name
    shutil.copytree(folder / "runs" / "whole", copy, ignore=shutil.ignore_patterns("hf", "tensorboard"))
    return str(copy / "checkpoints" / f"step_{step:06d}")


def test_a_run_that_one_controller_resumes_gives_the_numbers_of_two(
    whole: runs.Finished, folder: Path, tiny_dir: Path
) -> None:
    checkpoint = copy_of_run(folder, "resumed", 4)
    alone = ("train.steps=6", "controllers.num=1", "--resume", checkpoint)
    done = runs.run(runs.arguments(folder, tiny_dir, "resumed", *alone))
    assert done.status == 0, done.output
    assert curve(folder, "resumed") == curve(folder, "whole")


def check_that_it_trains_alike(folder: Path, name: str, step: int = 1) -> None:
    """Check that a run in another layout has the same prompts in `step` as the run named "whole", and the same
    rewards."""
    here, there = (
        next(record for record in runs.metrics(folder, run) if record["step"] == step) for run in (name, "whole")
    )
    assert here["rollout/logprob_diff_mean"] < 1e-3
    assert here["train/grad_norm"] > 0
    for key in ("reward/mean", "rollout/num_tokens"):
        assert here[key] == there[key]


def test_a_run_on_a_node_of_ones_own_gives_the_same_numbers(whole: runs.Finished, folder: Path, tiny_dir: Path) -> None:
    """Test the same seed with a data-plane node that another process started, and that several runs may use.

    The weights are broadcast, as to engines that share no memory with the trainer.
    """
    roots = {name: [str(folder / f"{name}-000000.tar")] for name in ("train", "eval")}
    with EmbeddedNode(memory_bytes=64 * 2**20, roots=roots) as node:
        where = (f"dataplane.uri={node.uri}", "data.train=train", "data.eval=eval", "weights.carrier=nccl")
        done = runs.run(runs.arguments(folder, tiny_dir, "external", "train.steps=2", *where))
        assert done.status == 0, done.output
        with Client(node.uri) as client:
            assert client.stat()["num_scopes"] == 0
            wait_until(lambda: client.stat()["num_leases"] == 0)  # as soon as the node sees that the readers are gone
    assert curve(folder, "external") == curve(folder, "whole")[:3]


@pytest.mark.timeout(1200)
def test_a_node_that_is_killed_twice_costs_time_only(
    whole: runs.Finished, folder: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = (NUM_EVAL + PER_STEP // 2, NUM_EVAL + 2 * PER_STEP)
    """The moments of the kills: in the middle of the first step's generation, and in the second step's."""
    monkeypatch.setenv(VARIABLE, ",".join(map(str, kills)))
    killing = "reward.function=tests.yatt_mm.killing_reward:even_length_after_a_kill"
    killed = runs.run(runs.arguments(folder, tiny_dir, "killed", "train.steps=2", killing))
    assert killed.status == 0, killed.output
    assert killed.left_behind == []
    assert curve(folder, "killed") == curve(folder, "whole")[:3]
    restarts = [record["dataplane/num_restarts"] for record in runs.metrics(folder, "killed")]
    assert restarts == [0, 1, 2]
    assert "ended with signal SIGKILL; it is started again" in killed.output
    assert all(record["dataplane/num_restarts"] == 0 for record in runs.metrics(folder, "whole"))


@pytest.mark.parametrize(
    ("number", "line", "layout"),
    [(signal.SIGINT, "step    1", "train.parallel.pp=2"), (signal.SIGTERM, "steps 1 to 1000", "train.parallel.tp=2")],
    ids=["training", "starting"],
)
def test_a_signal_stops_everything_that_was_started(
    whole: runs.Finished, folder: Path, tiny_dir: Path, number: signal.Signals, line: str, layout: str
) -> None:
    before = runs.shared_memory()
    name = f"interrupted-{number.name}"
    command = runs.arguments(folder, tiny_dir, name, "train.steps=1000", layout)
    with (
        tempfile.TemporaryDirectory(prefix="yt-") as temporary,
        runs.started(command, temporary=Path(temporary)) as (process, mark),
    ):
        assert process.stdout is not None
        seen = []
        for said in process.stdout:
            seen.append(said)
            if line in said:
                break
        if number is signal.SIGTERM:
            runs.wait_for_process(mark, runs.ENGINE, deadline_s=300)  # in the middle of vLLM's start
        assert process.poll() is None, "".join(seen)
        if number is signal.SIGINT:
            os.killpg(process.pid, number)  # what a terminal does: every process in the group gets it
        else:
            process.send_signal(number)
        done = runs.finish(process, mark, before, Path(temporary))
    assert done.status == 130, done.output
    assert "interrupted" in done.output
    assert done.left_behind == []
    if number is signal.SIGINT:
        check_that_it_trains_alike(folder, name)


def test_a_rule_and_judges_of_every_kind_add_up_by_weight_and_see_what_was_processed_for_the_policy(
    folder: Path, tiny_dir: Path
) -> None:
    judges = (
        *runs.judge(tiny_dir),
        "reward.weight=0.25",
        f"reward.judges.head.model={build_classifier(tiny_dir, folder / 'classifier')}",
        "reward.judges.head.verdict=classifier",
        "reward.judges.head.weight=0.1",
        "reward.judges.head.kv_cache_memory=64MiB",
        "reward.judges.head.max_model_len=256",
        "reward.judges.away.url=http://127.0.0.1:9/v1",  # no server listens there
        "reward.judges.away.model=judge",
        "reward.judges.away.weight=0.5",
        "reward.judges.away.max_attempts=1",
        "reward.judges.away.score_on_failure=0.5",
    )
    done = runs.run(runs.arguments(folder, tiny_dir, "judged", "train.steps=2", *judges))
    assert done.status == 0, done.output
    assert done.left_behind == []
    for record in runs.metrics(folder, "judged")[1:]:
        assert record["genrm/num_judged"] == record["sampling/num_prompts_used"] * 4 * 3
        assert record["genrm/num_failed"] == record["genrm/num_judged"] / 3, "those of the judge that is away"
        assert 0 < record["genrm/tiny_mean"] < 1
        assert record["genrm/head_mean"] != 0
        by_weight = {
            "reward/function_mean": 0.25,
            "genrm/head_mean": 0.1,
            "genrm/tiny_mean": 1.0,
            "genrm/away_mean": 0.5,
        }
        assert record["reward/mean"] == pytest.approx(sum(record[key] * weight for key, weight in by_weight.items()))
        assert record["time/genrm_s"] > 0
        assert record["genrm/bytes_moved"] > 0
        assert record["dataplane/num_processed"] == record["dataplane/num_media"]


def test_a_run_goes_on_in_another_layout_and_an_engine_over_two_devices_that_dies_is_named_and_ends_it(
    whole: runs.Finished, folder: Path, tiny_dir: Path
) -> None:
    before = runs.shared_memory()
    layout = ("train.parallel.tp=2", "rollout.tp=2", "rollout.num_engines=1")
    resumed = ("--resume", copy_of_run(folder, "widowed", 4))
    command = runs.arguments(folder, tiny_dir, "widowed", "train.steps=1000", *layout, *resumed)
    with (
        tempfile.TemporaryDirectory(prefix="yt-") as temporary,
        runs.started(command, temporary=Path(temporary)) as (process, mark),
    ):
        assert process.stdout is not None
        next(said for said in process.stdout if "step    5" in said)
        os.kill(runs.wait_for_process(mark, runs.ENGINE, deadline_s=10), signal.SIGKILL)
        done = runs.finish(process, mark, before, Path(temporary))
    assert done.status == 1, done.output
    assert "error: " in done.output and "engine" in done.output
    assert done.left_behind == []
    check_that_it_trains_alike(folder, "widowed", step=5)
