"""Brings files and folders to the disk, so that a loss of power takes nothing from them."""

import errno
import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Sync the content of a file to the disk."""
    _sync(path, os.O_RDONLY)


def sync_directory(folder: Path) -> None:
    """Sync the names in a folder to the disk. Some network file systems cannot, and keep names by themselves."""
    try:
        _sync(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
