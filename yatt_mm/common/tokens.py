"""Files with secrets: the tokens with which the processes of a run know each other, and the keys of servers."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_token(path: Path) -> Path:
    """Write a new random token into a file that only this user can read, and return the path. Raises OSError, also if
    the file exists."""
    return write_secret(path, secrets.token_hex(32))


def write_secret(path: Path, secret: str) -> Path:
    """Write a secret into a new file that only this user can read, and return the path. Raises OSError, also if the
    file exists."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:  # noqa: PTH123  a descriptor, not a path
        file.write(f"{secret}\n")
    return path
