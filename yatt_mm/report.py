"""What people see of a run: progress bar, one line a step, metrics.jsonl, TensorBoard, quarantine.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from tensorboard.summary import Writer

METRICS_FILE = "metrics.jsonl"
QUARANTINE_FILE = "quarantine.jsonl"


class Reporter:
    """Consumes the records that controllers hand over; a context manager."""

    def __init__(self, run_dir: Path, *, num_steps: int, first_step: int, console: Console) -> None:
        """Metrics of steps after `first_step` (from a run that is now resumed) are dropped."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self.accuracies: dict[int, float] = {}
        """Held-out accuracy by step, as seen so far."""
        self._console = console
        self._keep_until(run_dir / METRICS_FILE, first_step)
        self._keep_until(run_dir / QUARANTINE_FILE, first_step)
        self._metrics = (run_dir / METRICS_FILE).open("a")
        self._quarantine = (run_dir / QUARANTINE_FILE).open("a")
        self._writer = Writer(str(run_dir / "tensorboard"))
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
        self._writer.close()
        self._metrics.close()
        self._quarantine.close()

    def take(self, record: dict[str, Any]) -> None:
        """Show and store one record."""
        kind = record.pop("kind")
        if kind == "quarantine":
            self._quarantine.write(json.dumps(record) + "\n")
            self._quarantine.flush()
            self._console.print(
                f"[yellow]quarantined[/] {record['key']} in {record['shard']}: {record['reason']}",
                highlight=False,
                soft_wrap=True,
            )
            return
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        step = record["step"]
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)
        self._writer.flush()
        if "eval/accuracy" in record:
            self.accuracies[step] = record["eval/accuracy"]
        self._progress.update(self._bar, completed=step)
        self._console.print(_line(record), highlight=False, soft_wrap=True)

    def _keep_until(self, path: Path, first_step: int) -> None:
        if not path.exists():
            return
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        kept = [line for line in lines if json.loads(line)["step"] <= first_step]
        path.write_text("".join(line + "\n" for line in kept))
        for line in kept:
            record = json.loads(line)
            if "eval/accuracy" in record:
                self.accuracies[record["step"]] = record["eval/accuracy"]


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
    return "  ".join(parts)
