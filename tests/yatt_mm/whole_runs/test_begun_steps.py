"""Tests that a run that is lost, or told to stop, in a step goes on with the responses that were there."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import kills
from tests.yatt_mm.whole_runs.conftest import Digits
from tests.yatt_mm.whole_runs.kills import Kill
from yatt_mm.algorithms.kl import adapted
from yatt_mm.keeper.table import read_rows, table_path
from yatt_mm.protocol import group_record

pytestmark = [pytest.mark.alone, pytest.mark.endings, pytest.mark.timeout(1500)]


def arguments(digits: Digits, name: str, *overrides: str) -> list[str]:
    return digits.arguments(
        name,
        "train.steps=4",
        "train.prompts_per_step=16",
        "train.num_minibatches=2",
        "eval.every=4",
        "checkpoint.every=4",
        "checkpoint.keep=1",
        "algorithm.name=ppo",
        "algorithm.kl.where=reward",
        "algorithm.kl.target=0.05",
        "dataplane.memory=128MiB",
        *runs.judge(digits.model),
        *overrides,
    )


def test_a_run_that_is_lost_in_an_update_goes_on_with_the_responses_that_it_had(digits: Digits) -> None:
    """Test with a run that is lost whole, and that another number of controllers goes on with, on another node. Of the
    four steps the newest checkpoint has none, and three were begun."""
    whole = runs.run(arguments(digits, "not_lost"))
    assert whole.status == 0, whole.output
    dies = Kill(role="launcher", step=3, phase="train", after_s=0.0)
    at_phase = ("checkpoint.at=phase", "faults.max_restarts=0")
    spill = digits.folder / "spill"
    lost, done = kills.run(arguments(digits, "lost", *at_phase, f"dataplane.spill_dir={spill}"), [dies])
    assert done == [dies] and lost.status == 1 and lost.left_behind == [], lost.output
    assert spill.is_dir() and not list(spill.iterdir()), "the supervisor removed what its launcher had left there"
    checkpoints = digits.run("lost") / "checkpoints"
    saved = sorted(path.name for path in checkpoints.iterdir() if path.name[0] != ".")
    assert saved == ["begun_000001", "begun_000002", "begun_000003", "step_000000"]
    came: list[str] = []
    more = (*at_phase, "controllers.num=1", "--resume")
    resumed, _ = kills.run(arguments(digits, "lost", *more), [], came=came)
    assert resumed.status == 0 and resumed.left_behind == [], resumed.output
    phases = {(int(step), phase) for step, phase, _ in (line.split() for line in came if line.count(" ") == 2)}
    assert {(3, "train"), (4, "rollout"), (4, "genrm")} <= phases
    again = {(step, phase) for step, phase in phases if step < 4 and phase in ("rollout", "genrm")}
    assert not again, "what was there is neither sampled nor judged again"
    assert runs.curve(digits.folder, "lost") == runs.curve(digits.folder, "not_lost"), resumed.output
    assert [path.name for path in checkpoints.iterdir()] == ["step_000004"]
    last = runs.metrics(digits.folder, "lost")[-1]
    state = json.loads((checkpoints / "step_000004" / "state.json").read_text())
    assert state["kl_coef"] == adapted(last["train/kl_coef"], last["train/kl"], target=0.05)


NUM_PROMPTS = 96
LONG = (
    "rollout.deterministic=false",
    "sampling.replace_groups=false",
    "reward.function=tests.yatt_mm.any_reward:even_length",
    "rollouts.keep=all",
    "train.steps=2",
    f"train.prompts_per_step={NUM_PROMPTS}",
    "train.num_minibatches=2",
    "rollout.max_tokens=16",
    "rollout.max_groups_per_engine=1",
)
"""What makes the sampling of a step so long that there is a middle of it."""


def saved_groups(folder: Path) -> dict[int, tuple[list[list[int]], bool]]:
    """Return [position] the tokens of each response of a begun step, and True if the group is finished."""
    found = {}
    for path in folder.glob("groups-*.arrow"):
        with pa.ipc.open_file(path) as file:
            for row in file.read_all().to_pylist():
                record = group_record.decode(np.frombuffer(row["record"], np.uint8))
                is_finished = all(sample.finish_reason != "abort" for sample in record.samples)
                tokens = [sample.token_ids.tolist() for sample in record.samples]
                found[json.loads(row["group"])["slot"]["position"]] = (tokens, is_finished)
    return found


def responses(digits: Digits, name: str, step: int) -> dict[int, list[list[int]]]:
    """Return [position] the tokens of each response that a step was trained on."""
    found: dict[int, list[list[int]]] = defaultdict(list)
    for row in read_rows(table_path(digits.run(name), step)):
        if row["split"] == "train" and row["advantage"] is not None:
            found[row["position"]].append(row["token_ids"])
    return found


def landed(came: list[str], *, step: int) -> tuple[dict[int, str], dict[int, str]]:
    """Return [position] the record of each finished group of a step: of the first two controllers, and of those that
    came after them."""
    lines = [line.split() for line in came if line.startswith(f"{step} ")]
    first = list(dict.fromkeys(line[2] for line in lines))[:2]
    shares: tuple[dict[int, str], dict[int, str]] = ({}, {})
    for line in lines:
        if line[1] == "landed":
            shares[line[2] not in first][int(line[3])] = line[4]
    return shares


def test_a_run_that_is_told_to_stop_while_it_samples_goes_on_with_the_responses_that_it_had(digits: Digits) -> None:
    told = Kill(role="launcher", step=2, phase="finished", signal=signal.SIGTERM)
    stopped, done = kills.run(digits.arguments("sampled", *LONG), [told])
    assert done == [told] and stopped.status == 75 and stopped.left_behind == [], stopped.output
    checkpoints = digits.run("sampled") / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["begun_000002", "step_000001"]
    saved = saved_groups(checkpoints / "begun_000002")
    num_finished = sum(is_finished for _, is_finished in saved.values())
    assert 0 < num_finished < NUM_PROMPTS, "the signal came while it sampled"
    resumed = runs.run(digits.arguments("sampled", *LONG, "controllers.num=1", "--resume"))
    assert resumed.status == 0 and resumed.left_behind == [], resumed.output
    assert [record["step"] for record in runs.metrics(digits.folder, "sampled")] == [0, 1, 2]
    trained = responses(digits, "sampled", 2)
    assert sorted(trained) == [*range(NUM_PROMPTS, 2 * NUM_PROMPTS)], "no prompt is left out"
    assert all(len(tokens) == 8 for tokens in trained.values()), "no prompt comes twice"
    for position, (tokens, is_finished) in saved.items():
        for before, after in zip(tokens, trained[position], strict=True):
            assert before == after if is_finished else before == after[: len(before)]


def test_a_death_while_a_run_samples_costs_no_group_that_was_finished(digits: Digits) -> None:
    """Test with a controller, which is replaced with the others, and with an engine, whose groups the other one takes
    over. It is missed, and made again, when the roles change."""
    wanted = [
        Kill(role="controller", step=1, phase="finished"),
        Kill(role="engine core", step=2, phase="finished"),
    ]
    came: list[str] = []
    finished, done = kills.run(digits.arguments("bereft", *LONG), wanted, came=came)
    assert done == wanted and finished.status == 0 and finished.left_behind == [], finished.output
    (first, second) = kills.faults(digits.run("bereft"))
    assert (first["role"], first["phase"], first["step"]) == ("controller", "rollout", 1)
    assert (second["role"], second["step"]) == ("rollout", 2), second
    assert second["phase"] in ("rollout", "train", "publish"), second
    assert second["done"].startswith("engine ") and second["done"].endswith("controllers go on after step 1")
    lines = [line.split() for line in came if line.count(" ") == 2]
    pids = {pid for step, phase, pid in lines if (step, phase) == ("2", "rollout")}
    assert len(pids) == 2, "step 2 was sampled once"
    before, after = landed(came, step=1)
    assert before and len(after) == NUM_PROMPTS
    assert before.items() <= after.items(), "what the controllers had finished is not sampled again"
    for step in (1, 2):
        trained = responses(digits, "bereft", step)
        assert sorted(trained) == [*range((step - 1) * NUM_PROMPTS, step * NUM_PROMPTS)]
        assert all(len(tokens) == 8 for tokens in trained.values())
