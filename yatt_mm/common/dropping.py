"""Folders that lose their name as a whole before they lose their files: no part of one is ever taken for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from dataplane.core.disk_sync import sync_directory


def put_aside(folder: Path) -> Path:
    """Take the name from a folder, and return where it is: `.dropped_NAME` beside it. Raises OSError."""
    dropped = folder.with_name(f".dropped_{folder.name}")
    if dropped.exists():
        shutil.rmtree(dropped)
    folder.rename(dropped)
    return dropped


def drop(folder: Path) -> None:
    """Remove a folder. Raises OSError."""
    dropped = put_aside(folder)
    sync_directory(folder.parent)
    shutil.rmtree(dropped)
