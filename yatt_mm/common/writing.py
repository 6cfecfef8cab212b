"""Errors of the disk, as one line that names the file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from yatt_mm.common.errors import DiskError

ADVICE = {
    errno.ENOSPC: "make room on its disk; --resume then goes on from the last checkpoint",
    errno.EDQUOT: "make room within your quota; --resume then goes on from the last checkpoint",
    errno.EROFS: "choose a run.dir that can be written",
    errno.EACCES: "check who owns it and its mode",
}
"""What to do about an error of the operating system, by its errno."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a DiskError that names `path` where the block raises an OSError."""
    try:
        yield
    except DiskError:  # it names a file already
        raise
    except OSError as error:
        what, advice = error.strerror or str(error), ADVICE.get(error.errno or 0)
        raise DiskError(f"cannot write {path}: {what}{f'; {advice}' if advice else ''}") from error
