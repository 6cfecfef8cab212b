"""The folder of a run's results: only one run uses it at a time, and results of an earlier run are never lost."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from dataplane.core.disk_sync import sync_directory
from yatt_mm.common.checkpoints import Checkpoints, read_state
from yatt_mm.common.errors import ConfigError
from yatt_mm.common.writing import writing
from yatt_mm.config.run_config import Config, dump_config
from yatt_mm.reporting.fault_log import FAULTS_FILE
from yatt_mm.reporting.report import METRICS_FILE, read_records

CONFIG_FILE = "config.yaml"
EXPORT_DIR = "hf"
"""The folder with the model of a run that came to its end."""
BEST_DIR = "best"
"""The folder with the best model of a run."""
PRIVATE = 0o700
"""The mode of a new folder: responses, samples and weights are for its user alone, who may change the mode."""
FREE_TO_CHANGE = (
    "run.dir",
    "run.name",
    "train.steps",
    "train.max_time",
    "eval",
    "rollouts",
    "checkpoint",
    "dataplane",
    "ray",
    "controllers",
)
"""The keys and sections that may change when a run is resumed, without a warning."""


@contextmanager
def locked(config: Config) -> Iterator[None]:
    """Lock the name of the run.

    Raises:
        ConfigError: another run with the same name and folder is running.
    """
    path = config.run_dir.with_name(f".{config.run.name}.lock")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # another user who could open it could lock it too, and the run would not start
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run writes into {config.run_dir} now; wait for its end, or choose another run.name"
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def prepare(
    config: Config,
    checkpoint: Path | None,
    step: int,
    console: Console,
    *,
    begun: Collection[int] = (),
    is_same_run: bool = False,
) -> None:
    """Prepare the folder for a run that starts after `step`: an earlier run is moved aside, or continued. `begun`: the
    begun steps with which it goes on. `is_same_run`: True if it is the run itself that begins again after a fault; what
    it wrote of its faults stays."""
    folder = config.run_dir
    if checkpoint is None and (folder / METRICS_FILE).exists():
        aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        folder.rename(aside)
        has_checkpoint = Checkpoints.of_run(aside).steps()
        advice = "with --resume this run would have gone on with it" if has_checkpoint else "it has no checkpoint"
        console.print(f"{folder} held an earlier run, which is in {aside} now; {advice}", soft_wrap=True)
        if is_same_run and (aside / FAULTS_FILE).exists():
            with writing(folder):
                folder.mkdir(mode=PRIVATE)
                shutil.copy(aside / FAULTS_FILE, folder)
    if checkpoint is None and not is_same_run and config.log_dir.is_dir():
        shutil.rmtree(config.log_dir)  # of a start that came to nothing
    with writing(folder):
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    checkpoints = Checkpoints.of_run(folder, keep=config.checkpoint.keep)
    if config.checkpoint.dir is not None:
        _link(checkpoints.root, config, console)
    checkpoints.clear_partial()
    if checkpoint is not None:
        _tell_changes(config, checkpoint, console)
        for skipped in config.skipped_dir.glob("step_*"):
            if int(skipped.name.removeprefix("step_")) > step:
                shutil.rmtree(skipped)
        metric = read_state(checkpoint).get("config", {}).get("eval", {}).get("keep_best")
        is_later = best_step_of(folder) > step
        is_other = config.eval.keep_best is not None and metric != config.eval.keep_best
        if (folder / BEST_DIR).is_dir() and (is_later or is_other):
            aside = folder / f"{BEST_DIR}.{time.strftime('%Y%m%d-%H%M%S')}"
            (folder / BEST_DIR).rename(aside)
            why = "of a later step" if is_later else f"the best by {metric}, which is not eval.keep_best any more"
            console.print(f"the best model so far is {why}, and was moved to {aside}", soft_wrap=True)
        is_own = checkpoint.absolute().parent == checkpoints.root.absolute()
        aside_checkpoints = checkpoints.set_aside_after(step, but=begun if is_own else ())
        if config.references is not None:
            if aside_checkpoints is not None:
                config.references.set_aside_after(step, aside_checkpoints)
            with writing(config.references.renewed):
                config.references.bring(step, checkpoint)
        if aside_checkpoints is not None:
            console.print(f"what was saved after step {step} was moved to {aside_checkpoints}", soft_wrap=True)
    with writing(folder / CONFIG_FILE):
        (folder / CONFIG_FILE).write_text(dump_config(config))


def _link(link: Path, config: Config, console: Console) -> None:
    """Make the folder for the checkpoints in `checkpoint.dir`, and a link to it. A run that goes on keeps its own."""
    assert config.checkpoint.dir is not None
    parent = Path(config.checkpoint.dir).absolute()
    if not link.exists():
        target = parent / f"{config.run.name}.{time.strftime('%Y%m%d-%H%M%S')}"
        with writing(target):
            target.mkdir(mode=PRIVATE, parents=True)
        with writing(link):
            link.unlink(missing_ok=True)  # it may be a link to what is gone
            link.symlink_to(target)
            sync_directory(link.parent)
    elif link.resolve().parent != parent.resolve():
        console.print(
            f"checkpoint.dir is {config.checkpoint.dir}, but this run has its checkpoints in {link.resolve()}; it goes "
            "on there",
            soft_wrap=True,
        )


def best_step_of(folder: Path) -> int:
    """Return the step of the best model in a run's folder: that of its last record."""
    steps = [record.get("best/step", 0) for record in read_records(folder / METRICS_FILE)]
    return int(steps[-1]) if steps else 0


def _tell_changes(config: Config, checkpoint: Path, console: Console) -> None:
    before, now = flat(read_state(checkpoint).get("config", {})), flat(config.model_dump(mode="json"))
    if not before:
        return
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not key.startswith(FREE_TO_CHANGE):
            console.print(
                f"[yellow]changed since the checkpoint[/]: {key} was {before.get(key)}, is {now.get(key)}",
                highlight=False,
                soft_wrap=True,
            )


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a config by their dotted keys."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values
