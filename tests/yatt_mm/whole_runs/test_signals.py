"""Tests that a run that is told to stop at whatever moment loses nothing and leaves nothing behind, and goes on with
the numbers of a run without a break."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.yatt_mm import runs

pytestmark = [pytest.mark.alone, pytest.mark.endings]

NUM_SIGNALS = 20
LONGEST_END_S = 30.0
"""The seconds within which a run that was told to stop must have ended, on a busy machine too."""
SAVED, INTERRUPTED = 75, 130


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    runs.write_shard(folder / "train-000000.tar", range(40))
    runs.write_shard(folder / "eval-000000.tar", range(1000, 1012))
    return folder


def command(folder: Path, model: Path, name: str) -> list[str]:
    """Return the arguments of a run with evaluations and checkpoints in some of its steps, and an export at its end."""
    small = (
        "placement.num_devices=1",
        "rollout.num_engines=1",
        "train.steps=40",
        "checkpoint.every=15",
        "eval.every=10",
    )
    return runs.arguments(folder, model, name, *small, "--resume")


def told_after(
    command: list[str], moment_s: float, number: signal.Signals, *, is_for_the_group: bool
) -> tuple[str, int]:
    """Run, send the signal after `moment_s`, check the end, and return what happened as a line, with the status."""
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
    saved = next((said for said in done.output.splitlines() if said.startswith("saved after")), "").split(" and ")[0]
    target = "group" if is_for_the_group else "pid"
    line = f"{moment_s:5.1f} s  {number.name} to the {target}: status {done.status} after {seconds:.1f} s  {saved}"
    assert done.left_behind == [], f"{line}\n{done.left_behind}\n{done.output}"
    assert "Traceback" not in done.output, done.output
    assert seconds < LONGEST_END_S, line
    if done.status == INTERRUPTED:  # Ctrl-C before the first step: people do not want to go on
        assert number is signal.SIGINT and not saved, f"{line}\n{done.output}"
    if done.status in (INTERRUPTED, SAVED) and not saved:
        assert "interrupted; everything that this run started has been stopped" in done.output, done.output
    assert done.status in (0, SAVED, INTERRUPTED), f"{line}\n{done.output}"
    assert done.status or "done in" in done.output or "is finished" in done.output, f"{line}\n{done.output}"
    return line, done.status


@pytest.mark.timeout(7200)
def test_a_run_that_is_told_to_stop_twenty_times_has_the_numbers_of_one_without_a_break(
    folder: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    done = runs.run(command(folder, tiny_dir, "whole"))
    length_s = time.monotonic() - started
    assert done.status == 0, done.output
    draw, numbers, statuses = random.Random(0), itertools.count(), []
    name = f"told-{next(numbers)}"
    for place in range(NUM_SIGNALS):
        # the places are spread over the run's length, in a random order
        moment_s = 1 + (place * 7 % NUM_SIGNALS + draw.random()) / NUM_SIGNALS * (length_s - 1)
        number = (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)[place % 3]
        line, status = told_after(command(folder, tiny_dir, name), moment_s, number, is_for_the_group=place % 4 >= 2)
        with capsys.disabled():
            print(line, flush=True)
        statuses.append(status)
        if status == 0:
            assert runs.curve(folder, name) == runs.curve(folder, "whole")
            name = f"told-{next(numbers)}"
    assert runs.run(command(folder, tiny_dir, name)).status == 0
    assert runs.curve(folder, name) == runs.curve(folder, "whole")
    assert statuses.count(SAVED) >= NUM_SIGNALS / 2


KINDS = {
    "stream": ("sampling.over_dispatch=1.5", "sampling.tail=continue"),
    "in turns": (
        "sampling.tail=restart",
        "sampling.over_dispatch=1.5",
        "placement.num_devices=1",
        "rollout.num_engines=1",
        "JUDGE",
    ),
    "divided devices": ("placement.mode=partial_colocation", "placement.decide_every_s=0.02", "JUDGE"),
}
"""The ways in which a batch is filled, other than in rounds."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_each_kind_is_saved_in_the_middle_of_a_step_and_goes_on(
    kind: str, folder: Path, tiny_dir: Path
) -> None:
    name = kind.replace(" ", "_")
    more = [part for one in KINDS[kind] for part in (runs.judge(tiny_dir) if one == "JUDGE" else (one,))]
    base = ("rollout.deterministic=false", "eval.every=0", "checkpoint.every=0", *more, "--resume")
    long = runs.arguments(folder, tiny_dir, name, "train.steps=1000", *base)
    done = runs.run_until("step    2", lambda process, _: os.kill(process.pid, signal.SIGTERM), long)
    assert done.status == SAVED and done.left_behind == [], done.output
    saved = int(next(line for line in done.output.splitlines() if line.startswith("saved after step")).split()[3])
    assert saved >= 2
    short = runs.arguments(folder, tiny_dir, name, f"train.steps={saved + 1}", *base)
    done = runs.run(short)
    assert done.status == 0 and done.left_behind == [], done.output
    if kind == "stream":  # a run that was killed while it wrote its model writes it at the next start
        model = folder / "runs" / name / "hf" / "model.safetensors"
        before = model.read_bytes()
        shutil.rmtree(model.parent)
        done = runs.run(short)
        assert done.status == 0 and model.read_bytes() == before, done.output
        assert "is finished" in runs.run(short).output
    assert [record["step"] for record in runs.metrics(folder, name)] == list(range(saved + 2))


@pytest.mark.timeout(1200)
def test_a_run_is_saved_before_its_time_runs_out(folder: Path, tiny_dir: Path) -> None:
    started = time.monotonic()
    overrides = (
        "train.steps=1000",
        "train.max_time=80s",
        "placement.num_devices=1",
        "rollout.num_engines=1",
        "checkpoint.every=0",
    )
    done = runs.run(runs.arguments(folder, tiny_dir, "timed", *overrides))
    assert done.status == SAVED and done.left_behind == [], done.output
    assert time.monotonic() - started < 80 + 10, "the imports before the start are not counted"
    assert "saved after step" in done.output and "train.max_time of 80 s runs out" in done.output
    saved = sorted(path.name for path in (folder / "runs" / "timed" / "checkpoints").iterdir())
    assert saved[0] == "step_000001", "one of the first step, to know how long saving takes"
