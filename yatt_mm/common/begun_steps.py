"""Begun steps on disk: the groups of steps that come after the newest checkpoint, with the records of their responses.

`runs/<name>/checkpoints/begun_000011/` has a file of groups for each controller, `state.json` (the order of prompts
once the groups are drawn, the config, and whether the groups are all that the step trains on) and `manifest.json`. It
has no weights: those are in the checkpoint before it, and an update makes them again from the groups. A folder gets and
loses its name as a whole, and goes when every checkpoint that could need it is gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt_mm.common.dropping import drop, take_name
from yatt_mm.common.errors import CheckpointError
from yatt_mm.common.manifest import check_files, write_manifest
from yatt_mm.common.writing import writing

STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunStep:
    """One begun step, as it was found on disk."""

    step: int
    folder: str
    is_whole: bool
    """True if its groups are those that the step trains on; False if the step goes on with them."""
    sampling: dict[str, Any]
    """The state of the prompts, in which its groups are drawn already."""
    config: dict[str, Any]
    """The config of the run that wrote it."""

    def files(self, controller: int, num_controllers: int) -> list[Path]:
        """Return this controller's share of the files. A step may have been begun by another number of controllers."""
        names = sorted(Path(self.folder).glob("groups-*.arrow"), key=lambda path: int(path.stem.partition("-")[2]))
        return names[controller::num_controllers]


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunSteps:
    """The begun steps in one folder of checkpoints."""

    root: Path

    def begin(self, step: int) -> Path:
        """Return the folder for what there is of `step`. It does not count before `commit`. Several processes may call
        this."""
        folder = self.root / f".partial_begun_{step:06d}"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit(self, step: int, *, is_whole: bool, sampling: dict[str, Any], config: dict[str, Any]) -> Path:
        """Mark what there is of `step` as complete, in place of what there was of it, and return its folder. Afterwards
        it outlives a loss of power.

        Raises:
            DiskError: a file could not be written or synced; the message names the folder.
        """
        partial, final = self.begin(step), self.folder(step)
        state = {"step": step, "is_whole": is_whole, "sampling": sampling, "config": config}
        with writing(partial / STATE_FILE):
            (partial / STATE_FILE).write_text(json.dumps(state, indent=1))
        with writing(partial):
            write_manifest(partial)
            take_name(partial, final)
        return final

    def steps(self) -> list[int]:
        """Return the steps of which there is something, ascending."""
        if not self.root.is_dir():
            return []
        names = (re.fullmatch(r"begun_(\d+)", path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def is_whole(self, step: int) -> bool:
        """Return True if all groups of `step` are there."""
        folder = self.folder(step)
        return folder.is_dir() and bool(json.loads((folder / STATE_FILE).read_text())["is_whole"])

    def after(self, step: int, tell: Callable[[str], None]) -> list[BegunStep]:
        """Return the steps with which a run can go on after a checkpoint of `step`: those right after it, up to the
        first one that is not whole, or not there, or damaged. `tell` gets a line about a damaged one."""
        found: list[BegunStep] = []
        while self.folder(step + len(found) + 1).is_dir() and all(begun.is_whole for begun in found):
            folder = self.folder(step + len(found) + 1)
            try:
                check_files(folder)
            except CheckpointError as error:
                tell(f"{error}; the responses of step {step + len(found) + 1} are sampled again")
                break
            found.append(BegunStep(folder=str(folder.absolute()), **json.loads((folder / STATE_FILE).read_text())))
        return found

    def drop_until(self, step: int) -> None:
        """Remove what there is of the steps until `step`. Each loses its name first. Raises OSError."""
        for old in self.steps():
            if old <= step:
                drop(self.folder(old))

    def folder(self, step: int) -> Path:
        """Return the folder of `step`, whether it is there or not."""
        return self.root / f"begun_{step:06d}"
