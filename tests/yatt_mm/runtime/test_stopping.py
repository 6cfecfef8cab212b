"""Tests of why and when a run stops before its last step."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from yatt_mm.config.values import parse_duration
from yatt_mm.runtime.command_line import status_of
from yatt_mm.runtime.signals import interrupt_on_signals, interrupted_by_people, signals_restored
from yatt_mm.runtime.stopping import ENDING_S, ONE_SIGNAL_S, Stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_for_a_stop_and_the_second_one_interrupts(number: signal.Signals) -> None:
    stopping = Stopping(None)
    with signals_restored():
        signal.signal(number, signal.SIG_DFL)  # the tests may have been started with `nohup`
        stopping.listen(Console(quiet=True))
        assert stopping.why() == ""
        signal.raise_signal(number)
        signal.raise_signal(number)  # one that was sent to the process and to its group
        assert stopping.why() == number.name and not stopping.is_by_time
        time.sleep(ONE_SIGNAL_S)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert interrupted_by_people(), "the status is 130: something is lost"
        signal.raise_signal(number)  # while everything is ended: it is only answered


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_is_answered_and_interrupts_once(number: signal.Signals) -> None:
    console = Console(file=io.StringIO(), width=200)
    with signals_restored():
        signal.signal(number, signal.SIG_DFL)  # the tests may have been started with `nohup`
        interrupt_on_signals(console)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)
    assert cast(io.StringIO, console.file).getvalue() == 2 * "stopping what this run started; one moment\n"


def test_a_run_that_nohup_started_goes_on_when_its_terminal_is_closed() -> None:
    stopping = Stopping(None)
    with signals_restored():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stopping.listen(Console(quiet=True))
        signal.raise_signal(signal.SIGHUP)
        assert stopping.why() == ""
        signal.raise_signal(signal.SIGTERM)
        assert stopping.why() == "SIGTERM"


@pytest.mark.parametrize(
    ("number", "loses_nothing", "status"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, True, 75),
        (signal.SIGHUP, True, 75),
        (signal.SIGTERM, False, 130),
    ],
)
def test_the_status_says_whether_to_start_again(number: signal.Signals, loses_nothing: bool, status: int) -> None:
    with signals_restored():
        signal.signal(number, signal.SIG_DFL)  # the tests may have been started with `nohup`
        told = status_of(lambda: signal.raise_signal(number), stopped="it", loses_nothing=loses_nothing)
    assert told == status


def test_a_signal_while_python_ends_does_not_change_the_status() -> None:
    program = (
        "import os, signal, sys\n"
        "from yatt_mm.runtime.command_line import status_of\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid()):\n"
        "        kill(pid, 2), kill(pid, 15)\n"
        "late = Late()\n"
        "sys.exit(status_of(lambda: None, stopped='it'))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_a_run_stops_so_early_that_what_has_to_be_finished_fits_into_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stopping = Stopping(100)
    stopping.take({"time/train_s": 5.0, "time/publish_s": 1.0, "time/rollout_s": 50.0})
    stopping.take({"time/train_s": 6.0, "time/publish_s": 1.0, "time/checkpoint_s": 3.0})
    stopping.take({})
    now_s = 1000 + 100 - ENDING_S - 2 * 10
    assert stopping.why() == ""
    now_s += 0.1
    assert stopping.why() == "train.max_time of 100 s runs out"
    assert stopping.is_by_time
    assert stopping.seconds == pytest.approx(70.1)
    assert Stopping(None).why() == ""


def test_a_time_in_which_no_step_ends_is_an_error_because_to_start_again_would_not_help() -> None:
    stopping = Stopping(30, before_s=29)
    assert stopping.why() == "train.max_time of 30 s runs out"
    too_short = stopping.error_after(0, run_dir=Path("runs/one"), has_moved=False)
    assert "train.max_time of 30 s is too short: no step ended in it" in str(too_short)
    assert status_of(lambda: raise_(too_short), stopped="it") == 2
    moved = stopping.error_after(1, run_dir=Path("runs/one"), has_moved=True)
    assert "saved after step 1 and stopped (train.max_time of 30 s runs out); start runs/one again" in str(moved)
    assert status_of(lambda: raise_(moved), stopped="it") == 75


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (1.5, 1.5),
        ("45", 45),
        ("45s", 45),
        ("90m", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        ("00:20:00", 1200),
        ("11:30:00", 41400),
        ("1-12:00:00", 129600),
        ("100:00:00", 360000),
    ],
)
def test_times_are_written_as_people_and_batch_systems_write_them(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:30", "5w", True, None, "1-12", "1:2:3"])
def test_another_text_is_refused_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match=r"found .* wanted seconds, or a time such as 90m, 12h"):
        parse_duration(text)
