"""Folders that end with their owner: the owner removes them at its end, or the next owner of the same user does if it
was killed.

The owner holds a lock on a file inside, which the system releases when the owner dies in any way. With a folder, named
semaphores are removed too: those that `semaphores_named` gave the name of the folder, or of a folder in it. Semaphores
cannot be in a folder, and a process that is killed leaves them.
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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

MAX_SOCKET_LENGTH = 107
"""The number of bytes that the path of a Unix socket may have. Sockets are in owned folders."""
LOCK_FILE = ".owner"
SEMAPHORES = Path("/dev/shm")
"""The folder in which Linux keeps named semaphores, as files `sem.NAME`."""
_REMOVE_S = 5.0
"""The time in seconds for which `remove` tries again, if other processes write into the folder at the same time."""

log = logging.getLogger(__name__)


@contextmanager
def owned_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Create a folder `parent/prefix...`, yield its path, and remove it at the end of the `with` block. Folders of dead
    owners with this prefix are removed first."""
    remove_orphans(parent, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with _owned(folder):
        yield folder


@contextmanager
def same_folder(folder: Path, prefix: str) -> Iterator[None]:
    """Create a folder that `owned_folder` created on another machine, with the same path, for the `with` block.

    Raises:
        OSError: it cannot be made; FileExistsError if it is there, because both machines have the same files.
    """
    remove_orphans(folder.parent, prefix)
    folder.mkdir(mode=0o700)
    with _owned(folder):
        yield


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Own a new folder during a block, and remove it at the end, before the lock is released: no other owner finds a
    folder that is being removed free."""
    with ExitStack() as locked:
        try:
            lock = locked.enter_context((folder / f"{LOCK_FILE}.new").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the lock file appears locked, so that no other owner finds it free in between
            Path(lock.name).rename(folder / LOCK_FILE)
            yield
        finally:
            remove(folder)


def remove_orphans(parent: Path, prefix: str) -> list[Path]:
    """Remove this user's folders whose owner is dead; return them. A folder without a lock file stays."""
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
            if os.fstat(fd).st_nlink:  # or it was removed between opening and locking
                remove(folder)
                removed.append(folder)
        except BlockingIOError:
            pass  # its owner is alive
        finally:
            os.close(fd)
    if removed:
        log.warning("removed what killed processes had left: %s", ", ".join(map(str, removed)))
    return removed


def remove(folder: Path) -> None:
    """Remove the folder with everything in it, and the semaphores that are named after it or a folder in it."""
    for named in (folder, *folder.glob("yatt-*/")):
        for semaphore in SEMAPHORES.glob(f"sem.{named.name}-*"):
            with suppress(OSError):  # another user may have made a file of this name, which stays
                semaphore.unlink()
    deadline = time.monotonic() + _REMOVE_S
    while True:  # processes that are being killed may still write into it
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        if time.monotonic() > deadline:
            log.warning("%s could not be removed; remove it by hand", folder)
            return
        time.sleep(0.1)


@contextmanager
def semaphores_named(folder: Path) -> Iterator[None]:
    """Name multiprocessing semaphores after `folder`, in the processes that are started during the block."""
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # children inherit it
    before = settings["semprefix"]
    settings["semprefix"] = f"/{folder.name}"
    try:
        yield
    finally:
        settings["semprefix"] = before
