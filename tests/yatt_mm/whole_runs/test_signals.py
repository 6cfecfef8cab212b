"""Tests that a run ends well at whatever moment it is told to: from its first second to its last."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.yatt_mm import runs

pytestmark = [pytest.mark.alone, pytest.mark.faults]

NUM_MOMENTS = 20
LONGEST_END_S = 30.0
"""The seconds within which a run that was told to end must have ended, on a busy machine too."""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> list[str]:
    """The arguments of a short run with two evaluations, two steps, a checkpoint and an export."""
    folder = tmp_path_factory.mktemp("signals")
    runs.write_shard(folder / "train-000000.tar", range(40))
    runs.write_shard(folder / "eval-000000.tar", range(1000, 1012))
    small = ("placement.num_devices=1", "rollout.num_engines=1", "train.steps=2", "checkpoint.every=1")
    return runs.arguments(folder, tiny_dir, "told", *small)


def told_at(command: list[str], moment_s: float, number: signal.Signals, *, is_for_the_group: bool) -> str:
    """Run, send the signal after `moment_s`, check the end, and return what happened as a line."""
    before = runs.shared_memory()
    with tempfile.TemporaryDirectory(prefix="yt-") as temporary:
        with runs.started(command, temporary=Path(temporary)) as (process, mark):
            try:
                process.wait(moment_s)
            except subprocess.TimeoutExpired:
                (os.killpg if is_for_the_group else os.kill)(process.pid, number)
            sent = time.monotonic()
            done = runs.finish(process, mark, before, Path(temporary))
    seconds = time.monotonic() - sent
    target = "group" if is_for_the_group else "pid"
    line = f"{moment_s:5.1f} s  {number.name} to the {target}: status {done.status} after {seconds:.1f} s"
    assert done.left_behind == [], f"{line}\n{done.left_behind}\n{done.output}"
    assert done.status == 130 or (done.status == 0 and "done in" in done.output), f"{line}\n{done.output}"
    assert done.status == 0 or "interrupted; everything that this run started has been stopped" in done.output
    assert "Traceback" not in done.output, done.output
    assert seconds < LONGEST_END_S, line
    return line


@pytest.mark.timeout(7200)
def test_a_signal_at_any_moment_ends_everything_in_seconds(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    done = runs.run(command)
    length_s = time.monotonic() - started
    assert done.status == 0, done.output
    draw = random.Random(0)
    for place in range(NUM_MOMENTS):
        moment_s = draw.uniform(place, place + 1) / NUM_MOMENTS * (length_s - 1) + 1
        number = (signal.SIGINT, signal.SIGTERM)[place % 2]
        line = told_at(command, moment_s, number, is_for_the_group=place % 4 >= 2)
        with capsys.disabled():
            print(line, flush=True)
