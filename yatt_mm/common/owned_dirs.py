"""Folders that end with their owner: removed at its end, or by the next one of the same user if it was killed.

The owner holds a lock on a file inside, which the kernel drops when the owner dies however it dies. With a folder go
the named semaphores that `semaphores_named` made processes call after it, or after a folder in it: they cannot lie in
a folder, and a process that is killed leaves them.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = ".owner"
SEMAPHORES = Path("/dev/shm")
"""Where Linux keeps named semaphores, flat, as files `sem.NAME`."""
_REMOVE_S = 5.0
"""For so long a folder that fills up again is removed again."""

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
        remove(folder)


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
            remove(folder)
            removed.append(folder)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    if removed:
        log.warning("removed what a run that was killed had left: %s", ", ".join(map(str, removed)))
    return removed


def remove(folder: Path) -> None:
    """Remove the folder with all that is in it, and the semaphores that are called after it or a folder in it."""
    for named in (folder, *folder.glob("yatt-*/")):
        for semaphore in SEMAPHORES.glob(f"sem.{named.name}-*"):
            semaphore.unlink(missing_ok=True)
    deadline = time.monotonic() + _REMOVE_S
    while True:  # what is being killed may still write into it
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        if time.monotonic() > deadline:
            log.warning("%s could not be removed; remove it by hand", folder)
            return
        time.sleep(0.1)


@contextmanager
def semaphores_named(folder: Path) -> Iterator[None]:
    """Processes that are started inside call their multiprocessing semaphores after `folder`."""
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # children inherit it
    before = settings["semprefix"]
    settings["semprefix"] = f"/{folder.name}"
    try:
        yield
    finally:
        settings["semprefix"] = before
