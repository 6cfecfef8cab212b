"""Which folder has the reference model of a step, where the policy takes its place every few steps. No torch.

With `every` 100, the policy of step 100 is the reference of the steps from 101 to 200. Its folder is written before the
checkpoint of step 100, so a run that goes on from a checkpoint finds it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

FOLDER = "reference"
"""The name of the folder of renewed references in a run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFolders:
    """The folders of a run's references."""

    first: Path
    """The folder of the model that is the reference first."""
    renewed: Path
    """The folder of those that take its place."""
    every: int = 0
    """The steps between two of them; 0 keeps the first one."""

    def of(self, step: int) -> Path:
        """Return the folder of the reference in the update of a step, which is 1 or more."""
        last = (step - 1) // self.every * self.every if self.every else 0
        return self.folder(last) if last else self.first

    def folder(self, step: int) -> Path:
        """Return the folder for the policy after a step."""
        return self.renewed / f"step_{step:06d}"

    def is_due(self, step: int) -> bool:
        """Return True if the policy after a step becomes the reference."""
        return bool(self.every) and step > 0 and step % self.every == 0

    def set_aside_after(self, step: int, aside: Path) -> None:
        """Move the references of later steps into a folder, beside the checkpoints that go with them."""
        for folder in self.renewed.glob("step_*"):
            if int(folder.name.removeprefix("step_")) > step:
                (aside / FOLDER).mkdir(parents=True, exist_ok=True)
                folder.rename(aside / FOLDER / folder.name)

    def bring(self, step: int, checkpoint: Path) -> None:
        """Copy the reference of the step after `step` from beside a checkpoint, if that is of another run, or was set
        aside."""
        needed = self.of(step + 1)
        if needed == self.first:
            return
        for beside in (checkpoint.parent, checkpoint.parent.parent):
            found = beside.absolute() / FOLDER / needed.name
            if found.is_dir():
                if found != needed:
                    shutil.rmtree(needed, ignore_errors=True)
                    shutil.copytree(found, needed)
                return

    def prune(self, oldest_step: int) -> None:
        """Remove the folders that no run needs that goes on from `oldest_step` or later."""
        needed = self.of(oldest_step + 1)
        if needed == self.first:
            return
        for folder in self.renewed.glob("step_*"):
            if folder.name < needed.name:
                shutil.rmtree(folder)
