"""What people see of a run: progress bar, one line per step, metrics.jsonl, TensorBoard, and the other files of a run.

quarantine.jsonl has the samples that were skipped, placement.jsonl the divisions of devices with their reasons, and
timeline.json which role held which device when.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from yatt_mm.common.writing import writing
from yatt_mm.keeper.table import drop_after, read_rows, table_path
from yatt_mm.reporting.learning_watch import LearningWatch
from yatt_mm.reporting.tensorboard_file import TensorboardFile
from yatt_mm.reporting.timeline import TIMELINE_FILE, Timeline

METRICS_FILE = "metrics.jsonl"
QUARANTINE_FILE = "quarantine.jsonl"
PLACEMENT_FILE = "placement.jsonl"
NUM_SHOWN_PROMPTS = 4
"""The most prompts of a step's training, and of its evaluation, whose responses TensorBoard shows."""
NUM_SHOWN_STEPS = 10
"""The number of earlier steps whose responses a run that is resumed shows again. TensorBoard shows no more."""
NUM_TOLD = 5
"""The number of samples that were left out of which the console tells one by one."""
JUDGE_MEAN = re.compile(r"genrm/\w+_mean$")
"""The metric with the mean score of a judge."""


class Reporter:
    """Shows and stores the records that controllers hand over. A context manager: its end closes the files."""

    def __init__(
        self,
        run_dir: Path,
        *,
        num_steps: int,
        first_step: int,
        judges: Sequence[str],
        console: Console,
        min_reward_range: float = 0.0,
    ) -> None:
        """`judges`: their names. Metrics of steps after `first_step` (from a run that is resumed now) are dropped."""
        with writing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
        self.accuracies: dict[int, float] = {}
        """The held-out accuracy by step, so far."""
        self.last: dict[str, Any] = {}
        """The metrics of the last step so far."""
        self.num_quarantined = 0
        """The number of samples that cannot be used, as far as this run has told of them."""
        self.num_filtered = 0
        """The number of training samples that `data.filter` left out."""
        self.num_without_score = 0
        """The number of responses to which the reward function or a judge gave no score, in the steps of this run."""
        self.learning = LearningWatch(min_reward_range=min_reward_range)
        self._away: set[str] = set()
        """The judges whose server is away."""
        self._console = console
        kept = _keep_until(run_dir / METRICS_FILE, first_step)
        for name in (QUARANTINE_FILE, PLACEMENT_FILE):
            _keep_until(run_dir / name, first_step)
        self._files = {}
        for name in (METRICS_FILE, QUARANTINE_FILE, PLACEMENT_FILE):
            with writing(run_dir / name):
                self._files[name] = (run_dir / name).open("a")
        self._timeline = Timeline(run_dir / TIMELINE_FILE, judges=judges, continues=first_step > 0)
        # TensorBoard files are written again from the records that are kept
        shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        drop_after(run_dir, first_step)
        self._run_dir = run_dir
        self._tensorboard = TensorboardFile(run_dir / "tensorboard")
        for record in kept:
            self._plot(record)
        for record in kept[-NUM_SHOWN_STEPS:]:
            self._show_rollouts(record["step"])
        self._progress = Progress(
            TextColumn("[bold]step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._bar = self._progress.add_task("train", total=num_steps, completed=first_step)

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._tensorboard.close()
        for name, file in self._files.items():
            with writing(self._run_dir / name):
                file.close()

    def take(self, record: dict[str, Any]) -> None:
        """Show and store one record."""
        kind = record.pop("kind")
        if kind == "timeline":
            self._timeline.add(record["spans"], record["phases"])
        elif kind == "placement":
            self._write(PLACEMENT_FILE, record)
        elif kind == "quarantine":
            self._write(QUARANTINE_FILE, record)
            if record["is_filtered"]:
                self.num_filtered += 1
                return
            self.num_quarantined += 1
            if self.num_quarantined <= NUM_TOLD:
                self._warn("quarantined", f"{record['key']} in {record['shard']}: {record['reason']}")
            elif self.num_quarantined == NUM_TOLD + 1:
                self._warn("quarantined", f"further samples, which are in {self._run_dir / QUARANTINE_FILE} alone")
        elif kind == "skipped":
            self._warn("skipped", f"step {record['step']}, because {record['why']}; see {record['folder']}")
        elif kind == "failure":
            self._warn("no score", _failure(record))
        elif kind == "server":
            self._tell_server(record)
        else:
            self._write(METRICS_FILE, record)
            self.last = record
            self.num_without_score += _num_failed(record)
            self._plot(record)
            self._show_rollouts(record["step"])
            self._progress.update(self._bar, completed=record["step"])
            self._console.print(_line(record), highlight=False, soft_wrap=True)
            if warning := self.learning.take(record):
                self._warn("no signal", warning)

    def warn_of_fault(self, text: str) -> None:
        """Show what failed, or what was done about it."""
        self._warn("fault", text)

    def _warn(self, what: str, text: str) -> None:
        self._console.print(f"[yellow]{what}:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def _tell_server(self, record: dict[str, Any]) -> None:
        """Tell that a judge's server is away or back, once if several actors noticed it."""
        judge, is_away = record["judge"], record["is_away"]
        if is_away == (judge in self._away):
            return
        self._away ^= {judge}
        self._warn("waiting" if is_away else "back", record["text"])

    def _write(self, name: str, record: dict[str, Any]) -> None:
        with writing(self._run_dir / name):
            self._files[name].write(json.dumps(record) + "\n")
            self._files[name].flush()

    def _plot(self, record: dict[str, Any]) -> None:
        self._tensorboard.add_metrics(record)
        if "eval/accuracy" in record:
            self.accuracies[record["step"]] = record["eval/accuracy"]

    def _show_rollouts(self, step: int) -> None:
        """Let TensorBoard show what the model said in a step, if it was kept."""
        path = table_path(self._run_dir, step)
        if not path.exists():
            return
        try:
            rows = read_rows(path, max_prompts=NUM_SHOWN_PROMPTS)
        except (OSError, pa.ArrowException) as error:
            self._warn("warning", f"{path} cannot be read: {error}")
        else:
            self._tensorboard.add_rollouts(step, rows)


def read_records(path: Path, last_step: float = math.inf) -> list[dict[str, Any]]:
    """Return the records of a file up to a step, without a last line that was cut off; none if there is no file."""
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    return [record for record in map(json.loads, lines) if record["step"] <= last_step]


def _keep_until(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Drop later steps from a file of records, and a last line that was cut off; return what is left. The file is
    replaced as a whole, so that no record is lost if this process dies."""
    if not path.exists():
        return []
    kept = read_records(path, last_step)
    text = "".join(json.dumps(record) + "\n" for record in kept)
    if text != path.read_text():
        rest = path.with_name(f".{path.name}")
        with writing(path):
            rest.write_text(text)
            rest.replace(path)
    return kept


def _failure(record: dict[str, Any]) -> str:
    """Return the text that tells of a kind of failure for the first time."""
    response = f" The first of them: {record['response']!r}." if record["response"] else ""
    text = (
        f"{record['who']} failed on {record['num_failed']} of the {record['num_responses']} responses of "
        f"{record['among']}, which score {record['score']}.{response} {record['what']} ({record['where']})"
    )
    return f"{text}\n{record['trace']}".rstrip()


def _line(record: dict[str, Any]) -> str:
    parts = [f"[bold]step {record['step']:>4}[/]"]
    for name, label, form in (
        ("eval/accuracy", "held-out", ".3f"),
        ("reward/mean", "reward", ".3f"),
        ("train/loss", "loss", "+.4f"),
        ("train/entropy", "entropy", ".3f"),
        ("train/grad_norm", "grad", ".3f"),
        ("rollout/logprob_diff_mean", "diff", ".1e"),
        ("rollout/num_tokens", "tokens", ".0f"),
        ("time/rollout_s", "rollout", ".2f"),
        ("time/train_s", "train", ".2f"),
        ("time/publish_s", "publish", ".2f"),
        ("time/step_s", "step", ".2f"),
    ):
        if name in record:
            unit = "s" if name.startswith("time/") else ""
            parts.append(f"{label} {record[name]:{form}}{unit}")
        if name == "reward/mean":
            parts += _means(record)
    if num_failed := _num_failed(record):
        parts.append(f"[yellow]failed {num_failed}[/]")
    return "  ".join(parts)


def _num_failed(record: dict[str, Any]) -> int:
    """Return the number of responses of a step and its evaluation without a score, once for each that gave none."""
    return round(sum(record.get(name, 0) for name in ("reward/num_errors", "eval/num_errors", "genrm/num_failed")))


def _means(record: dict[str, Any]) -> list[str]:
    """Return the mean scores that the reward is made of, if judges take part."""
    found = [("function", record["reward/function_mean"])] if "reward/function_mean" in record else []
    found += [(key[len("genrm/") : -len("_mean")], value) for key, value in record.items() if JUDGE_MEAN.match(key)]
    return [f"{label} {value:.3g}" for label, value in found]
