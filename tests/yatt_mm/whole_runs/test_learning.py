"""Tests that a run learns what its rewards say, and nothing where they say nothing; and what it reports and leaves."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataplane.core.digests import content_digest
from tests.yatt_mm import runs
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.whole_runs.conftest import CORRUPT, NUM_PROMPTS, NUM_STEPS, NUM_TRAIN, Digits
from yatt_mm.keeper.table import Row, by_prompt, read_rows, table_path

pytestmark = pytest.mark.alone

FLOOR = 0.75
"""The held-out accuracy that the run must reach. It begins near 0.48."""
NOISE = 0.05
"""The held-out accuracy by which a run that learns nothing may be better afterwards."""
LATE = (
    "rollout.deterministic=false",
    "rollout.max_groups_per_engine=12",
    "sampling.over_dispatch=1.5",
    "sampling.tail=continue",
    "rollouts.keep=all",
)
"""Overrides of a run whose rounds end without their slowest responses; the next step begins with them."""
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


def test_the_model_learns_to_read_the_held_out_scans(whole: runs.Finished, digits: Digits) -> None:
    assert whole.status == 0, whole.output
    before, halfway, after = digits.accuracies("whole")
    assert before == pytest.approx(digits.accuracy, abs=1.5 / digits.num_eval), "as transformers measured it"
    assert halfway > before + 2 * NOISE
    assert after > FLOOR
    rewards = [record["reward/mean"] for record in runs.metrics(digits.folder, "whole")[1:]]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2])


def test_the_best_model_is_kept_with_its_step(whole: runs.Finished, digits: Digits) -> None:
    assert whole.status == 0, whole.output
    folder, last = digits.run("whole"), runs.metrics(digits.folder, "whole")[-1]
    assert (last["best/step"], last["best/value"]) == (NUM_STEPS, max(digits.accuracies("whole")))
    kept, exported = ((folder / name / "model.safetensors").read_bytes() for name in ("best", "hf"))
    assert kept == exported
    assert f"at step {NUM_STEPS}; model in {folder / 'best'}" in whole.output
    state = json.loads((folder / "checkpoints" / f"step_{NUM_STEPS:06d}" / "state.json").read_text())
    assert state["best"] == {"step": NUM_STEPS, "value": last["best/value"]}


@pytest.fixture(scope="module")
def small_runs(whole: runs.Finished, digits: Digits) -> dict[str, runs.Finished]:
    """Two runs beside each other, each with one controller, one engine and one rank on one device: with shuffled
    answers, in rounds that end without their slowest responses, and from the exported folder with the opposite
    reward."""
    assert whole.status == 0, whole.output
    exported = f"model.path={digits.run('whole') / 'hf'}"
    controls = {
        "shuffled": ("data.shuffle_answers=true", f"train.steps={NUM_STEPS // 2}", *LATE),
        "opposite": (
            exported,
            "checkpoint.asynchronous=false",
            "train.steps=3",
            "reward.function=tests.yatt_mm.any_reward:wrong_answer",
        ),
    }
    with ThreadPoolExecutor() as pool:
        begun = {
            name: pool.submit(runs.run, digits.arguments(name, *runs.ONE_OF_EACH, *overrides))
            for name, overrides in controls.items()
        }
        return {name: run.result() for name, run in begun.items()}


@pytest.mark.parametrize("name", ["shuffled", "opposite"])
def test_runs_beside_each_other_end_well_and_leave_nothing_behind(
    small_runs: dict[str, runs.Finished], name: str
) -> None:
    assert (small_runs[name].status, small_runs[name].left_behind) == (0, []), small_runs[name].output


def test_with_shuffled_answers_it_learns_nothing(small_runs: dict[str, runs.Finished], digits: Digits) -> None:
    before, after = digits.accuracies("shuffled")
    assert after < before + NOISE
    _, halfway, _ = digits.accuracies("whole")
    assert halfway > after + 2 * NOISE, "the run with the right answers, after as many steps"
    grads = [record["train/grad_norm"] for record in runs.metrics(digits.folder, "shuffled")[1:]]
    assert min(grads) > 0, "it was trained"


def test_a_round_ends_without_its_slowest_responses_and_the_next_step_begins_with_them(
    small_runs: dict[str, runs.Finished], digits: Digits
) -> None:
    _, *records = runs.metrics(digits.folder, "shuffled")
    for record in records:
        assert record["sampling/num_groups"] == NUM_PROMPTS
        assert record["sampling/num_carried"] > 0
        assert record["sampling/num_prompts_used"] - record["sampling/num_carried"] >= NUM_PROMPTS
    first, second, *_ = records
    rows = read_rows(table_path(digits.run("shuffled"), second["step"]))
    positions = {row["position"] for row in rows if row["split"] == "train"}
    begun_before = {position for position in positions if position < first["sampling/num_prompts_used"]}
    assert 0 < len(begun_before) <= first["sampling/num_carried"]


def test_a_checkpoint_that_is_not_asynchronous_is_committed_in_its_step(
    small_runs: dict[str, runs.Finished], digits: Digits
) -> None:
    committed = {
        name: [record["step"] for record in runs.metrics(digits.folder, name) if "time/commit_s" in record]
        for name in small_runs
    }
    assert committed == {"opposite": [3], "shuffled": [4, 6]}, "a checkpoint follows the record of its step"


def test_with_the_opposite_reward_it_forgets_and_begins_with_the_accuracy_of_the_exported_folder(
    small_runs: dict[str, runs.Finished], digits: Digits
) -> None:
    """Test with the folder that the run exported: vLLM and Megatron load it."""
    before, after = digits.accuracies("opposite")
    assert 1 - before == pytest.approx(digits.accuracies("whole")[-1], abs=1.5 / digits.num_eval)
    assert after > before + 0.1, "the share of wrong answers"


def test_it_ends_well_and_leaves_nothing_behind(whole: runs.Finished) -> None:
    assert whole.status == 0, whole.output
    assert whole.left_behind == []
    assert "held-out accuracy" in whole.output


def test_every_process_has_a_log_of_its_own(whole: runs.Finished, digits: Digits) -> None:
    roles = ("controller", "engine", "rank")
    logs = {path.name for path in (digits.run("whole") / "logs").iterdir()}
    assert logs - {"node.log"} == {
        *(f"{role}-{number}.log" for role in roles for number in range(2)),
        *("reward-0.log", "rendezvous.log", "coordinator.log", "keeper.log"),
    }, "the node's is there if it has printed something"
    for number in range(2):
        log = (digits.run("whole") / "logs" / f"engine-{number}.log").read_text()
        assert "checkpoint shards" in log, "what the engine's own process prints"


def test_every_step_has_the_promised_metrics(whole: runs.Finished, digits: Digits) -> None:
    records = runs.metrics(digits.folder, "whole")
    assert [record["step"] for record in records] == list(range(NUM_STEPS + 1))
    assert [record["step"] for record in records if "eval/accuracy" in record] == [0, 6, 12]
    for record in records[1:]:
        assert set(record) >= REQUIRED_KEYS
        assert record["rollout/logprob_diff_mean"] < 1e-5
        assert record["rollout/logprob_diff_max"] < 1e-3
        assert record["rollout/staleness_max"] == 0
        assert record["rollout/stale_tokens_frac"] == 0
        num_used = record["sampling/num_prompts_used"]
        assert num_used * record["reward/has_signal_frac"] >= NUM_PROMPTS, "the batch is full of groups with signal"
        assert record["sampling/num_rejected"] <= num_used - NUM_PROMPTS
    assert list((digits.run("whole") / "tensorboard").glob("events.*"))
    assert (digits.run("whole") / "config.yaml").exists()


def test_the_processor_runs_once_per_image(whole: runs.Finished, digits: Digits) -> None:
    last = runs.metrics(digits.folder, "whole")[-1]
    assert last["dataplane/num_media"] == last["dataplane/num_processed"] == NUM_TRAIN - 1 + digits.num_eval
    assert last["dataplane/num_recomputed"] == 0


def test_a_corrupt_image_is_set_aside_with_its_reason(whole: runs.Finished, digits: Digits) -> None:
    from examples.digits.data import make_split

    lines = (digits.run("whole") / "quarantine.jsonl").read_text().splitlines()
    (notice,) = (json.loads(line) for line in lines)
    assert notice["key"] == make_split(seed=0).train[CORRUPT].key
    assert Path(notice["shard"]).name.startswith("train-")
    assert notice["reason"]
    assert sum(record.get("data/num_quarantined", 0) for record in runs.metrics(digits.folder, "whole")) == 1


def test_what_the_model_said_is_kept_as_it_was(whole: runs.Finished, digits: Digits) -> None:
    """Test every row against the metrics of its step, and 20 of them against the data set and the tokenizer."""
    from examples.digits.data import make_split
    from examples.digits.model import load_processor

    rows: list[Row] = []
    for record in runs.metrics(digits.folder, "whole"):
        of_step = read_rows(table_path(digits.run("whole"), record["step"]))
        rows += of_step
        for split, mean in (("train", "reward/mean"), ("eval", "eval/accuracy")):
            rewards = [row["reward"] for row in of_step if row["split"] == split]
            assert bool(rewards) == (mean in record)
            assert not rewards or np.mean(rewards) == pytest.approx(record[mean])
        trained = [row for row in of_step if row["split"] == "train"]
        assert sum(len(row["token_ids"]) for row in trained) == record.get("rollout/num_tokens", 0)
        in_batch = [group for group in by_prompt(of_step, "train") if group[0]["advantage"] is not None]
        assert len(in_batch) == record.get("sampling/num_groups", 0)
        for group in in_batch:
            rewards_G = np.array([row["reward"] for row in group])
            wanted_G = (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + 1e-6)
            assert [row["advantage"] for row in group] == pytest.approx(list(wanted_G), abs=1e-6)
    split, tokenizer = make_split(seed=0), load_processor(digits.model).tokenizer
    scans = {content_digest(scan.png): scan for scan in (*split.train, *split.held_out)}
    for at in np.random.default_rng(0).choice(len(rows), 20, replace=False):
        row = rows[at]
        (medium,) = row["media"]
        scan = scans[medium["source"]]
        assert row["answer"] == scan.answer and row["reward"] == float(row["response"].strip() == scan.answer)
        assert tokenizer.decode(row["token_ids"], skip_special_tokens=True) == row["response"]
        pixels = [np.asarray(Image.open(io.BytesIO(file)).convert("L")) for file in (scan.png, medium["thumbnail"])]
        assert np.abs(pixels[0].astype(int) - pixels[1]).mean() < 4


def test_the_exported_folder_holds_what_was_trained_and_reads_as_well_in_transformers(
    whole: runs.Finished, digits: Digits, ranks: RankPool
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    from examples.digits.data import make_split
    from examples.digits.model import load_processor
    from examples.digits.warmup import _make_batch, measure_accuracy

    folder = digits.run("whole") / "hf"
    exported = load_file(folder / "model.safetensors")
    checkpoint = digits.run("whole") / "checkpoints" / f"step_{NUM_STEPS:06d}"
    trained = ranks.run(1, jobs.load_and_export, digits.model, checkpoint)[0]
    assert exported.keys() == trained.keys() == load_file(digits.model / "model.safetensors").keys()
    assert all(np.array_equal(exported[name].numpy(), trained[name]) for name in trained)

    processor = load_processor(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    batch = _make_batch(processor, make_split(seed=0).held_out)
    accuracy = measure_accuracy(model, batch, processor.tokenizer.eos_token_id)
    assert accuracy == pytest.approx(digits.accuracies("whole")[-1], abs=1.5 / digits.num_eval)
