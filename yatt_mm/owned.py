"""Folders that end with their owner: removed at its end, or by the next one of the same user if it was killed.

The owner holds a lock on a file inside, which the kernel drops when the owner dies however it dies.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = ".owner"

log = logging.getLogger(__name__)


@contextmanager
def owned_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder `parent/prefix...`; what dead owners left there with this prefix is removed first."""
    remove_orphans(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with (folder / f"{LOCK_FILE}.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(lock.name).rename(folder / LOCK_FILE)  # it appears locked: nobody finds it free in between
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_orphans(parent: Path, prefix: str) -> list[Path]:
    """Remove this user's folders whose owner is dead; returns them. One without a lock file is nobody's to judge."""
    removed = []
    for folder in parent.glob(f"{prefix}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    if removed:
        log.warning("removed what a run that was killed had left: %s", ", ".join(map(str, removed)))
    return removed
