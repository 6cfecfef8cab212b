"""The folders of a run that are removed when it ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from yatt_mm.common.owned_dirs import owned_folder, remove_orphans

SHARED_MEMORY = Path("/dev/shm")
FILES_PREFIX, WEIGHTS_PREFIX = "yatt-", "yatt-weights-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """The folders of a run that are removed when it ends."""

    files: Path
    """Logs, sockets, temporary files."""
    weights: Path
    """Published weights, in shared memory."""


@contextmanager
def scratch_folders() -> Iterator[Scratch]:
    """Make the folders, and remove them at the end of the block."""
    with owned_folder(Path(tempfile.gettempdir()), FILES_PREFIX) as files:
        parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else files
        with owned_folder(parent, WEIGHTS_PREFIX) as weights:
            yield Scratch(files=files, weights=weights)


def remove_scratch_of_dead_runs() -> None:
    """Remove the folders of runs of this user that were killed."""
    remove_orphans(Path(tempfile.gettempdir()), FILES_PREFIX)
    remove_orphans(SHARED_MEMORY, WEIGHTS_PREFIX)
