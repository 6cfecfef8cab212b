"""Errors of the disk, as one line that names the file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from yatt_mm.common.errors import DiskError

ADVICE = {
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room within your quota",
    errno.EROFS: "choose a run.dir that can be written",
    errno.EACCES: "check who owns it and its mode",
}
"""What to do about an error of the operating system, by its errno."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a DiskError that names `path` where the block raises an OSError."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "see why")
        what = error.strerror or str(error)
        raise DiskError(f"cannot write {path}: {what}; {advice}, and go on with --resume") from error
