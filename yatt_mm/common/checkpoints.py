"""Checkpoints on disk: written under a temporary name, brought to the disk, committed by one rename, verified by
`--resume`, and the oldest dropped.

`runs/<name>/checkpoints/step_000010/` holds the training ranks' state (they write it), `state.json` (the step, the
order of prompts) and `manifest.json` (`yatt_mm.common.manifest`). A folder gets and loses its final name as a whole.
Beside them is what there is of later steps (`yatt_mm.common.begun_steps`).
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.core.disk_sync import sync_directory
from yatt_mm.common.begun_steps import BegunSteps
from yatt_mm.common.dropping import drop, take_name
from yatt_mm.common.errors import CheckpointError
from yatt_mm.common.manifest import check_files, num_written, write_manifest
from yatt_mm.common.writing import writing

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run."""

    root: Path
    keep: int

    @classmethod
    def of_run(cls, run_dir: Path, *, keep: int = 1) -> Checkpoints:
        """Return those in the folder of a run."""
        return cls(root=run_dir / "checkpoints", keep=keep)

    @property
    def begun(self) -> BegunSteps:
        """The begun steps beside the checkpoints."""
        return BegunSteps(root=self.root)

    def begin(self, step: int) -> Path:
        """Return the folder for the checkpoint of `step`. It does not count before `commit`. Several processes may call
        this."""
        folder = self._partial(step)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def num_written(self, step: int) -> int:
        """Return the number of files of the checkpoint of `step` that their writers have finished."""
        return num_written(self._partial(step))

    def commit(self, step: int, state: dict[str, Any], *, best: int | None = None) -> Path:
        """Mark the checkpoint of `step` as complete, drop all but the `keep` newest and that of the step `best`, and
        return its folder. Afterwards the checkpoint outlives a loss of power. Begun steps that no kept checkpoint needs
        are dropped too.

        Raises:
            DiskError: a file could not be written or synced; the message names the folder. The checkpoint counts if the
                folder has its final name.
        """
        partial, final = self._partial(step), self.folder(step)
        with writing(partial / STATE_FILE), (partial / STATE_FILE).open("w") as file:
            json.dump(state, file, indent=1)
        with writing(partial):
            write_manifest(partial)
            take_name(partial, final)
        with writing(final):
            for folder in self.root.resolve().parents[:3]:  # the first checkpoint of a run made them
                with contextlib.suppress(PermissionError):  # of a folder above those of this user
                    sync_directory(folder)
        for old in self.steps()[: -self.keep]:
            if old != best:
                with writing(self.folder(old)):
                    drop(self.folder(old))
        with writing(self.root):
            self.begun.drop_until(self.steps()[-self.keep :][0])
        return final

    def steps(self) -> list[int]:
        """Return the steps with a committed checkpoint, ascending."""
        if not self.root.is_dir():
            return []
        names = (re.fullmatch(r"step_(\d+)", path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def newest(self, tell: Callable[[str], None]) -> Path | None:
        """Return the folder of the newest checkpoint whose files are as they were written; None if there is no
        checkpoint at all. `tell` gets a line about each one that is damaged.

        Raises:
            CheckpointError: all of them are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                check_files(self.folder(step))
            except CheckpointError as error:
                tell(f"{error}{'; trying the checkpoint before it' if step != steps[0] else ''}")
            else:
                return self.folder(step)
        if steps:
            raise CheckpointError(
                f"--resume: no checkpoint in {self.root} can be used; leave --resume out to start afresh"
            )
        return None

    def set_aside_after(self, step: int, *, but: Collection[int] = ()) -> Path | None:
        """Move checkpoints and begun steps of later steps to another folder, because the run continues from `step` on
        another path. `but`: the begun steps with which it goes on. Return that folder, or None if there are none."""
        later = [self.folder(other) for other in self.steps() if other > step]
        later += [self.begun.folder(other) for other in self.begun.steps() if other > step and other not in but]
        if not later:
            return None
        aside = self.root / f"abandoned-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir()
        for folder in later:
            folder.rename(aside / folder.name)
        sync_directory(aside)
        sync_directory(self.root)
        return aside

    def clear_partial(self) -> None:
        """Remove the folders of checkpoints that an interrupted run did not complete, or did not drop to the end."""
        if self.root.is_dir():
            for path in (*self.root.glob(".partial_*"), *self.root.glob(".dropped_*")):
                shutil.rmtree(path)

    def folder(self, step: int) -> Path:
        """Return the folder of the committed checkpoint of `step`."""
        return self.root / f"step_{step:06d}"

    def _partial(self, step: int) -> Path:
        return self.root / f".partial_step_{step:06d}"


def find_checkpoint(run_dir: Path, resume: str, tell: Callable[[str], None]) -> Path | None:
    """Return the checkpoint folder that `--resume` names, after its files were compared with its manifest. `auto` is
    the newest one of the run that is not damaged, or None where the run has no checkpoint yet, so that one command can
    start a run and continue it. `tell` gets lines for people.

    Raises:
        CheckpointError: the folder is not a committed checkpoint, or is damaged; the folder of the run's checkpoints is
            a link to what is gone; or the run has none, and an earlier run of its name that was moved aside has.
    """
    if resume != "auto":
        check_files(Path(resume))
        return Path(resume)
    root = run_dir / "checkpoints"
    if root.is_symlink() and not root.exists():
        raise CheckpointError(
            f"--resume: {root} is a link to {root.readlink()}, which is not there; mount its filesystem, or leave "
            "--resume out to start afresh"
        )
    newest = Checkpoints(root=root, keep=1).newest(tell)
    if newest is None:
        if moved := _moved(run_dir):
            raise CheckpointError(f"--resume: no checkpoint in {root}; leave --resume out to start afresh{moved}")
        tell(f"--resume: no checkpoint in {root} yet; the run starts from its beginning")
    return newest


def read_state(folder: Path) -> dict[str, Any]:
    """Return the state that `Checkpoints.commit` got.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        return json.loads((folder / STATE_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot read {folder / STATE_FILE}: {error}") from error


def _moved(run_dir: Path) -> str:
    """Return what to do if an earlier run of this name was moved aside and has checkpoints; an empty text if none."""
    earlier = sorted(run_dir.parent.glob(f"{run_dir.name}.[0-9]*-[0-9]*"))
    saved = [folder for folder in earlier if Checkpoints.of_run(folder).steps()]
    if not saved:
        return ""
    return f". An earlier run of this name was moved to {saved[-1]}: to go on with it, move it back to {run_dir} first"
