"""Tests of the process that starts the launcher, with a launcher that is killed at will (`launcher_double.py`)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.dataplane.shards import has_ended, wait_until

SUPERVISE = """
import sys
from yatt_mm.runtime import supervisor
supervisor.LAUNCHER = ("-m", "tests.yatt_mm.runtime.launcher_double")
sys.exit(supervisor.supervise(sys.argv[2:], sys.argv[1] or None))
"""


def start(folder: Path, *ways: str, resume: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SUPERVISE, resume, str(folder), *ways]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lives(folder: Path) -> list[dict[str, Any]]:
    path = folder / "lives.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def waiting(folder: Path) -> tuple[subprocess.Popen[str], psutil.Process, psutil.Process]:
    """Start a launcher that runs until SIGTERM, which it handles by now. Return (its supervisor, the launcher, what it
    has started)."""
    supervisor = start(folder, "wait")
    wait_until(lambda: (folder / "waits").exists())
    (launcher,) = psutil.Process(supervisor.pid).children()
    return supervisor, launcher, psutil.Process(lives(folder)[0]["left"])


def is_over(pid: int) -> bool:
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize("status", [0, 1, 2, 75, 130])
def test_the_status_of_a_launcher_that_came_to_its_end_is_that_of_the_run(status: int, tmp_path: Path) -> None:
    assert start(tmp_path, str(status)).wait(60) == status
    (life,) = lives(tmp_path)
    assert life["loss"] is None and life["resume"] == []


def test_the_status_is_that_with_which_the_run_ended_also_if_its_process_crashes_after_it(tmp_path: Path) -> None:
    assert start(tmp_path, "crashes").wait(60) == 75
    assert len(lives(tmp_path)) == 1


def test_a_run_whose_terminal_is_gone_is_started_again(tmp_path: Path) -> None:
    supervisor = start(tmp_path, "kill")
    assert supervisor.stdout is not None
    supervisor.stdout.close()  # as if what reads it was killed
    assert supervisor.wait(60) == 0
    assert len(lives(tmp_path)) == 2


def test_a_death_is_that_of_the_step_after_the_finished_one_or_in_the_export_of_that_one(tmp_path: Path) -> None:
    assert start(tmp_path, "kill", "exports").wait(60) == 0
    assert [life["at"] for life in lives(tmp_path)[1:]] == [["train", 1], ["export", 0]]


def test_a_launcher_that_was_killed_is_started_again_and_what_it_left_is_ended(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    supervisor = start(tmp_path, "kill", "lost")
    said, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, said
    first, second, third = lives(tmp_path)
    assert (first["resume"], second["resume"], third["resume"]) == ([], ["--resume=auto"], ["--resume=auto"])
    assert second["loss"] == "the launcher was ended by SIGKILL" and third["loss"] == "the rendezvous was lost"
    assert is_over(first["left"]), "it lost its parent, and belonged to the run"
    assert said.count("fault: ") == 2
    assert first["started_s"] == third["started_s"], "train.max_time is that of the run"


def test_a_run_without_a_checkpoint_starts_again_from_its_beginning(tmp_path: Path) -> None:
    assert start(tmp_path, "kill").wait(60) == 0
    assert [life["resume"] for life in lives(tmp_path)] == [[], []]


def test_launchers_that_are_lost_at_the_same_step_again_and_again_end_the_run(tmp_path: Path) -> None:
    supervisor = start(tmp_path, "kill", "kill", "kill", "kill")
    said, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1 and len(lives(tmp_path)) == 3
    assert "error: the launcher was ended by SIGKILL" in said and "faults.max_restarts is 2" in said
    (fault,) = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert (fault["role"], fault["phase"], fault["step"], fault["done"]) == ("launcher", "train", 1, "ended the run")


def test_a_loss_after_which_the_run_cannot_start_again_is_written_down(tmp_path: Path) -> None:
    supervisor = start(tmp_path, "kill", "refused")
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1 and len(lives(tmp_path)) == 2
    (fault,) = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert (fault["why"], fault["done"]) == ("the launcher was ended by SIGKILL", "ended the run")


def test_a_run_that_starts_again_for_more_hosts_has_no_fault(tmp_path: Path) -> None:
    supervisor = start(tmp_path, *["grows"] * 4)
    said, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0 and len(lives(tmp_path)) == 5, "faults.max_restarts is 2"
    assert "fault: " not in said


def test_launchers_that_die_early_after_the_run_had_more_hosts_are_counted(tmp_path: Path) -> None:
    assert start(tmp_path, "grows", *["early"] * 5).wait(60) == 1
    assert len(lives(tmp_path)) == 1 + 3, "faults.max_restarts is 2"


def test_what_all_hosts_see_of_a_launcher_goes_with_it(tmp_path: Path) -> None:
    assert start(tmp_path, "shares", "kill", "kill").wait(60) == 1
    assert not list(tmp_path.glob(".run.hosts-*"))


def test_steps_that_are_finished_in_between_begin_the_count_anew(tmp_path: Path) -> None:
    assert start(tmp_path, *["moves"] * 5).wait(60) == 0
    assert len(lives(tmp_path)) == 6


def test_a_launcher_that_dies_before_its_run_has_a_folder_is_not_started_again(tmp_path: Path) -> None:
    assert start(tmp_path, "early").wait(60) == 1
    assert len(lives(tmp_path)) == 1


def test_a_run_that_was_resumed_from_elsewhere_does_not_go_on_from_an_older_checkpoint_of_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoints" / "step_000000").mkdir(parents=True)
    assert start(tmp_path, "kill", resume="elsewhere").wait(60) == 0
    assert [life["resume"] for life in lives(tmp_path)] == [["--resume=elsewhere"]] * 2


def test_a_run_goes_on_from_the_checkpoint_that_it_saved_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_000000").mkdir(parents=True)
    assert start(tmp_path, "kill").wait(60) == 0
    assert [life["resume"] for life in lives(tmp_path)] == [[], ["--resume=auto"]]


def test_a_signal_reaches_the_launcher_and_its_status_is_that_of_the_run(tmp_path: Path) -> None:
    supervisor, *_ = waiting(tmp_path)
    supervisor.send_signal(signal.SIGTERM)
    said, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 75, said
    assert "ended before it was saved" not in said


def test_a_launcher_whose_supervisor_is_killed_is_told_to_stop(tmp_path: Path) -> None:
    supervisor, launcher, left = waiting(tmp_path)
    supervisor.kill()
    supervisor.wait(60)
    try:
        wait_until(lambda: has_ended(left))  # the launcher ends it when it gets SIGTERM, and nothing else does
        wait_until(lambda: has_ended(launcher))
    finally:
        for process in (launcher, left):
            with suppress(psutil.NoSuchProcess):
                process.kill()
