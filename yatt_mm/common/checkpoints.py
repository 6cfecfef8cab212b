"""Checkpoints on disk: written under a temporary name, committed by one rename, found again by `--resume`, and the
oldest dropped.

`runs/<name>/checkpoints/step_000010/` holds the training ranks' state (they write it) and `state.json` (the step, the
order of prompts). A folder without `state.json` under its final name does not exist for `--resume`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt_mm.common.errors import CheckpointError
from yatt_mm.common.writing import writing

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints of one run."""

    root: Path
    keep: int

    def begin(self, step: int) -> Path:
        """Return the folder for the checkpoint of `step`. It does not count before `commit`. Several processes may call
        this."""
        folder = self._partial(step)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit(self, step: int, state: dict[str, Any], *, best: int | None = None) -> Path:
        """Mark the checkpoint of `step` as complete, drop all but the `keep` newest and that of the step `best`, and
        return its folder."""
        partial, final = self._partial(step), self._final(step)
        with writing(partial / STATE_FILE), (partial / STATE_FILE).open("w") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        for old in self.steps()[: -self.keep]:
            if old != best:
                shutil.rmtree(self._final(old))
        return final

    def steps(self) -> list[int]:
        """Return the steps with a committed checkpoint, ascending."""
        if not self.root.is_dir():
            return []
        names = (re.fullmatch(r"step_(\d+)", path.name) for path in self.root.iterdir())
        found = (int(match[1]) for match in names if match)
        return sorted(step for step in found if (self._final(step) / STATE_FILE).is_file())

    def set_aside_after(self, step: int) -> Path | None:
        """Move checkpoints of later steps to another folder, because the run continues from `step` on another path.
        Return that folder, or None if there are none."""
        later = [other for other in self.steps() if other > step]
        if not later:
            return None
        aside = self.root / f"abandoned-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.mkdir()
        for other in later:
            self._final(other).rename(aside / self._final(other).name)
        return aside

    def clear_partial(self) -> None:
        """Remove the folders of checkpoints that an interrupted run did not complete."""
        if self.root.is_dir():
            for path in self.root.glob(".partial_step_*"):
                shutil.rmtree(path)

    def _final(self, step: int) -> Path:
        return self.root / f"step_{step:06d}"

    def _partial(self, step: int) -> Path:
        return self.root / f".partial_step_{step:06d}"


def find_checkpoint(run_dir: Path, resume: str) -> Path:
    """Return the checkpoint folder that `--resume` names; `auto` is the newest one of the run.

    Raises:
        CheckpointError: there is none, or the folder is not a committed checkpoint.
    """
    root = run_dir / "checkpoints"
    if resume == "auto":
        steps = Checkpoints(root=root, keep=1).steps()
        if not steps:
            raise CheckpointError(
                f"--resume: no committed checkpoint in {root}; leave --resume out to start afresh{_moved(run_dir)}"
            )
        return root / f"step_{steps[-1]:06d}"
    folder = Path(resume)
    if not (folder / STATE_FILE).is_file():
        raise CheckpointError(
            f"--resume: {folder} has no {STATE_FILE}, so it is not a committed checkpoint; name a step_NNNNNN "
            "folder, or auto for the newest one of the run"
        )
    return folder


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
    saved = [folder for folder in earlier if Checkpoints(root=folder / "checkpoints", keep=1).steps()]
    if not saved:
        return ""
    return f". An earlier run of this name was moved to {saved[-1]}: to go on with it, move it back to {run_dir} first"
