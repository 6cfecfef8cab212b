"""Tests of what a run survives, of how it goes on, and of how it ends when it must: killed nodes, ranks and engines,
another number of controllers, another layout, signals."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from tests.dataplane.shards import wait_until
from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import deaths, kills
from tests.yatt_mm.whole_runs.conftest import Digits
from tests.yatt_mm.whole_runs.kills import Kill
from yatt_mm.common.checkpoints import Checkpoints

pytestmark = pytest.mark.alone

ONE_ENGINE = "rollout.num_engines=1"
"""An engine starts in 20 s of processor, and a deterministic run has the same bits with any number of them."""


def curve(digits: Digits, name: str) -> list[dict[str, float]]:
    """Return what must be the same in two runs, by step."""
    return runs.curve(digits.folder, name)


def ctrl_c(process: subprocess.Popen[str], mark: str) -> None:
    """Do what a terminal does: every process in the group gets the signal."""
    os.killpg(process.pid, signal.SIGINT)


def check_saved_and_stopped(done: runs.Finished, folder: Path) -> None:
    """Check that a run ended after Ctrl-C in its fifth step or later, saved, and left nothing behind."""
    assert (done.status, done.left_behind) == (75, []), done.output
    (said,) = (line for line in done.output.splitlines() if line.startswith("saved after step"))
    assert "stopped (SIGINT)" in said and "SIGINT: saving and stopping; a second signal stops at once" in done.output
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())[-1]
    assert int(said.split()[3]) == int(saved.removeprefix("step_")) >= 5, (said, saved)


@pytest.fixture(scope="module")
def killed(digits: Digits) -> runs.Finished:
    """A run of which one process after the other is killed; engines die in `make faults`. Ranks die in the update after
    a save that they have not finished yet. Only one fault in a row is repaired: the second death of a rank in the same
    save ends it."""
    saving = digits.run("killed") / "checkpoints" / ".partial_step_000004"
    wanted = [
        Kill(role="node", step=1, phase="rollout", after_s=0.3),
        Kill(role="node", step=2, phase="rollout", after_s=0.3),
        Kill(role="controller", step=3, phase="rollout"),
        Kill(role="rank", step=5, phase="train", after_s=0.0, folder=saving),
        Kill(role="rank", step=5, phase="train", after_s=0.0, folder=saving),
    ]
    finished, done = kills.run(digits.arguments("killed", "faults.max_restarts=1", ONE_ENGINE), wanted)
    assert done == wanted, f"these kills took place: {done}\n{finished.output}"
    return finished


@pytest.mark.timeout(1200)
def test_a_node_that_is_killed_twice_costs_time_only(
    killed: runs.Finished, whole: runs.Finished, digits: Digits
) -> None:
    records = runs.metrics(digits.folder, "killed")
    assert [record["dataplane/num_restarts"] for record in records[:3]] == [0, 1, 2], killed.output
    assert "ended with signal SIGKILL; it is started again" in killed.output
    assert all(record["dataplane/num_restarts"] == 0 for record in runs.metrics(digits.folder, "whole"))


def test_controllers_and_ranks_that_die_cost_time_only(
    killed: runs.Finished, whole: runs.Finished, digits: Digits
) -> None:
    assert curve(digits, "killed") == curve(digits, "whole")[:5], killed.output
    faults = kills.faults(digits.run("killed"))
    found = [(fault["role"], fault["phase"], fault["step"]) for fault in faults]
    assert found[:3] == [("node", "rollout", 1), ("node", "rollout", 2), ("controller", "rollout", 3)], faults
    assert len(found) == 5 and set(found[3:]) <= {("train", "train", 5), ("train", "publish", 5)}, (
        "the next step goes on while the checkpoint is written, and its update may be over when a death is noticed"
    )
    assert faults[2]["done"] == "controllers go on after step 2", "no rank waits for its own"
    assert faults[3]["done"] == "all training ranks (from step 2) started again; controllers go on after step 4"
    assert all(0 <= fault["seconds"] < 120 for fault in faults)


def test_a_rank_that_dies_too_often_is_named_and_the_checkpoint_does_not_count(
    killed: runs.Finished, digits: Digits
) -> None:
    assert killed.status == 1, killed.output
    (said,) = (line for line in killed.output.splitlines() if line.startswith("error: "))
    assert "training rank" in said, said
    assert kills.faults(digits.run("killed"))[-1]["done"] == "ended the run"
    assert killed.left_behind == []
    checkpoints = Checkpoints.of_run(digits.run("killed"))
    assert {path.name for path in checkpoints.root.iterdir()} - {".partial_step_000004"} == {"step_000002"}
    assert checkpoints.steps() == [2]


def test_one_controller_resumes_it_on_a_node_of_ones_own_and_gets_the_numbers_of_the_run_without_a_break_until_ctrl_c(
    killed: runs.Finished, whole: runs.Finished, digits: Digits
) -> None:
    """Test with a node that another process started, and that several runs may use. The weights are broadcast, as to
    engines that share no memory with the trainer."""
    assert killed.status == 1, killed.output
    roots = {name: [str(digits.folder / f"{name}-*.tar")] for name in ("train", "eval")}
    with EmbeddedNode(memory_bytes=64 * 2**20, roots=roots) as node:
        where = (f"dataplane.uri={node.uri}", "data.train=train", "data.eval=eval", "weights.carrier=nccl")
        more = ("controllers.num=1", ONE_ENGINE, "train.steps=1000", "--resume")
        done = runs.run_until("step    5", ctrl_c, digits.arguments("killed", *where, *more))
        with Client(node.uri) as client:
            assert client.stat()["num_scopes"] == 0
            wait_until(lambda: client.stat()["num_leases"] == 0)  # as soon as the node sees that the readers are gone
    check_saved_and_stopped(done, digits.run("killed"))
    assert [record["step"] for record in runs.metrics(digits.folder, "killed")][:6] == [0, 1, 2, 3, 4, 5]
    assert curve(digits, "killed")[:6] == curve(digits, "whole")[:6]


@pytest.mark.endings
def test_a_checkpoint_goes_on_in_another_layout(whole: runs.Finished, digits: Digits) -> None:
    """Test a checkpoint of two replicas that one replica of two stages continues, with one engine over two devices."""
    assert whole.status == 0, whole.output
    shutil.copytree(digits.run("whole"), digits.run("stopped"), ignore=shutil.ignore_patterns("hf", "tensorboard"))
    layout = ("train.parallel.pp=2", "rollout.tp=2", "rollout.num_engines=1")
    resumed = ("--resume", str(digits.run("stopped") / "checkpoints" / "step_000004"))
    done = runs.run_until("step    5", ctrl_c, digits.arguments("stopped", "train.steps=1000", *layout, *resumed))
    check_saved_and_stopped(done, digits.run("stopped"))
    here, there = (
        next(record for record in runs.metrics(digits.folder, name) if record["step"] == 5)
        for name in ("stopped", "whole")
    )
    assert here["rollout/logprob_diff_mean"] < 1e-5
    assert here["train/grad_norm"] == pytest.approx(there["train/grad_norm"], rel=1e-3)
    for key in ("reward/mean", "rollout/num_tokens"):
        assert here[key] == there[key]


@pytest.mark.endings
@pytest.mark.parametrize(
    ("line", "is_for_the_group"),
    [("steps 1 to 1000", False), ("steps 1 to 1000", True), ("step    1", False), ("step    1", True)],
)
def test_a_second_sigterm_does_no_harm(line: str, is_for_the_group: bool, digits: Digits) -> None:
    """Test the signals in the middle of vLLM's start, where nothing can be lost, and of the second step, where the run
    may be saved before the second one comes."""

    def stop(process: subprocess.Popen[str], mark: str) -> None:
        runs.wait_for_process(mark, runs.ENGINE, deadline_s=300)
        for _ in range(2):
            (os.killpg if is_for_the_group else os.kill)(process.pid, signal.SIGTERM)
            time.sleep(1.5)
        begun.append(time.monotonic())

    begun: list[float] = []
    done = runs.run_until(line, stop, digits.arguments("terminated", "train.steps=1000"))
    assert done.status == (130 if line == "step    1" and "interrupted" in done.output else 75), done.output
    assert "interrupted" in done.output or "saved after step" in done.output, done.output
    assert done.left_behind == []
    assert time.monotonic() - begun[0] < 25


@pytest.mark.endings
def test_an_engine_over_two_devices_that_dies_is_made_again_and_leaves_nothing(digits: Digits) -> None:
    layout = ("train.parallel.tp=2", "rollout.tp=2", "rollout.num_engines=1", "train.steps=3")
    dies = Kill(role="engine core", step=2, phase="rollout")
    finished, done = kills.run(deaths.arguments(digits, "widowed", *layout), [dies])
    assert done == [dies] and finished.status == 0, finished.output
    (fault,) = kills.faults(digits.run("widowed"))
    assert (fault["role"], fault["done"]) == ("rollout", "engine 0 started again; controllers go on after step 1")
    assert finished.left_behind == []


@pytest.mark.endings
def test_a_rank_that_stands_still_is_found_by_what_it_finishes_and_made_again(
    whole: runs.Finished, digits: Digits
) -> None:
    """Before the new ranks have loaded the checkpoint, a controller dies too."""
    stops = Kill(role="rank", step=3, phase="train", signal=signal.SIGSTOP)
    dies = Kill(role="controller", step=2, phase="resume", after_s=0.0)
    waits = ("train.steps=6", "controllers.deadline_s=25")
    finished, done = kills.run(digits.arguments("still", ONE_ENGINE, *waits), [stops, dies])
    assert done == [stops, dies] and finished.status == 0, finished.output
    (fault, other) = kills.faults(digits.run("still"))
    assert (fault["role"], fault["phase"], fault["step"]) == ("train", "train", 3) and fault["seconds"] < 120
    when_it_was_stopped = r"did not finish (update of step 3 in 25 s|becoming awake in 12\.5 s)"
    assert re.search(when_it_was_stopped, fault["why"]), fault
    assert fault["done"].startswith("all training ranks (from step 2) started again"), fault
    assert (other["role"], other["phase"], other["step"]) == ("controller", "resume", 2), other
    assert curve(digits, "still") == curve(digits, "whole")[:7]
    assert finished.left_behind == []
