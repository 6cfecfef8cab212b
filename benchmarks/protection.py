"""Measures what it costs that a run loses nothing: the journal, the saves, and the processes that watch.

    python -m examples.digits.prepare
    python benchmarks/protection.py [--json] [--steps 16] [--every 25] [key=value ...]

The digits are trained on three times: without checkpoints, with one after each step, and with the responses of each
step saved before its update (`checkpoint.at=phase`). `wall` are seconds for which a step waits, without
the first two steps, and `cpu` processor seconds of all processes of the run: for saves the difference between two runs,
and for watching those of supervisor and launcher, which do nothing else in a step. Shares are those of a step without
checkpoints; saves are counted once in `--every` steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import psutil

from benchmarks.common.memory import cpu_s
from benchmarks.common.runs import parser, show

CONFIG = "configs/digits_cpu.yaml"
FIRST = 2
"""The step from whose end on everything is counted."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a step of one run takes."""

    step_s: float
    journal_s: float
    checkpoint_s: float
    cpu_s: float
    """The processor seconds of all processes."""
    watching_cpu_s: float
    """Those of supervisor and launcher."""


def main() -> None:
    """Run three times, and print the table."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--steps", type=int, default=16)
    arguments.add_argument("--every", type=int, default=25, help="the steps for which one checkpoint is counted")
    arguments.add_argument("overrides", nargs="*", metavar="key=value")
    options = arguments.parse_intermixed_args()
    more = [f"train.steps={options.steps}", "eval.every=0", *options.overrides]
    without = run(options.steps, [*more, "checkpoint.every=0"])
    saving = run(options.steps, [*more, "checkpoint.every=1"])
    responses = run(options.steps, [*more, f"checkpoint.every={options.steps}", "checkpoint.at=phase"])
    rows = [
        row("journal", without, wall_s=without.journal_s),
        row("watching", without, cpu_s=without.watching_cpu_s),
        row("a checkpoint", without, saving.checkpoint_s, saving.cpu_s - without.cpu_s, every=options.every),
        row("responses", without, responses.checkpoint_s, responses.cpu_s - without.cpu_s),
    ]
    title = f"a step: {without.step_s:.2f} s, {without.cpu_s:.2f} processor seconds"
    show(title, rows, as_json=options.json)


def row(
    what: str, step: Measured, wall_s: float | None = None, cpu_s: float | None = None, *, every: int = 1
) -> dict[str, Any]:
    """Return one line of the results table."""
    found: dict[str, Any] = {"what": what, "every": every}
    if wall_s is not None:
        found |= {"wall": wall_s, "wall share": wall_s / every / step.step_s}
    if cpu_s is not None:
        found |= {"cpu": cpu_s, "cpu share": cpu_s / every / step.cpu_s}
    return found


def run(num_steps: int, overrides: list[str]) -> Measured:
    """Train, and return what the steps after `FIRST` took."""
    with tempfile.TemporaryDirectory(prefix="yatt-bench-") as folder:
        command = [sys.executable, "-m", "yatt_mm.train", CONFIG, f"run.dir={folder}", "run.name=run", *overrides]
        metrics = Path(folder) / "run" / "metrics.jsonl"
        used: dict[int, tuple[float, float]] = {}
        with subprocess.Popen(command, stdout=sys.stderr) as process:
            while process.poll() is None:
                step = max((int(record["step"]) for record in read(metrics)), default=0)
                if step not in used:
                    used[step] = processor_s(process.pid)
                time.sleep(POLL_S)
        if process.returncode:
            sys.exit(f"error: the run ended with {process.returncode}")
        records = [record for record in read(metrics) if record["step"] > FIRST]
    first, last = min(step for step in used if step >= FIRST), max(step for step in used if step < num_steps)
    per_step = [(after - before) / (last - first) for before, after in zip(used[first], used[last])]
    return Measured(
        step_s=median(record["time/step_s"] for record in records),
        journal_s=median(record["time/journal_s"] for record in records),
        checkpoint_s=mean(record.get("time/checkpoint_s", 0.0) for record in records),
        cpu_s=per_step[0],
        watching_cpu_s=per_step[1],
    )


def read(metrics: Path) -> Iterator[dict[str, float]]:
    """Yield the records of the steps that are finished."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
    yield from (json.loads(line) for line in lines if line.endswith("\n"))


def processor_s(supervisor: int) -> tuple[float, float]:
    """Return the processor seconds of all processes of a run so far, and those of its supervisor and launcher."""
    process = psutil.Process(supervisor)
    launchers = [child.pid for child in process.children() if "yatt_mm.train" in child.cmdline()]
    every = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            every += sum(one.cpu_times()[:4])  # with those of children that have ended
        except psutil.NoSuchProcess:
            continue
    return every, cpu_s([supervisor, *launchers])


if __name__ == "__main__":
    main()
