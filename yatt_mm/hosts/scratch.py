"""The folders of a run that are removed when it ends. They have the same paths on all of its hosts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from yatt_mm.common.owned_dirs import owned_folder, remove_orphans, same_folder

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


@contextmanager
def same_scratch_folders(scratch: Scratch) -> Iterator[None]:
    """Make the folders of a run's first host on another one, and remove them at the end of the block.

    Raises:
        OSError: one of them cannot be made.
    """
    with same_folder(scratch.files, FILES_PREFIX):
        if scratch.weights.is_relative_to(scratch.files):
            scratch.weights.mkdir(mode=0o700)
            yield
        else:
            with same_folder(scratch.weights, WEIGHTS_PREFIX):
                yield


def remove_scratch_of_dead_runs() -> None:
    """Remove the folders of runs of this user that were killed."""
    remove_orphans(Path(tempfile.gettempdir()), FILES_PREFIX)
    remove_orphans(SHARED_MEMORY, WEIGHTS_PREFIX)
