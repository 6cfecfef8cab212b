"""Folders that lose their name as a whole before they lose their files: no part of one is ever taken for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from dataplane.core.disk_sync import sync_directory


def take_name(partial: Path, final: Path) -> None:
    """Give the folder `partial` the name `final`, also for after a loss of power. A folder that has this name loses it
    a moment before, and its files at the end. Raises OSError."""
    dropped = _put_aside(final) if final.exists() else None
    partial.rename(final)
    sync_directory(final.parent)
    if dropped is not None:
        shutil.rmtree(dropped)


def drop(folder: Path) -> None:
    """Remove a folder. Raises OSError."""
    dropped = _put_aside(folder)
    sync_directory(folder.parent)
    shutil.rmtree(dropped)


def _put_aside(folder: Path) -> Path:
    """Take the name from a folder, and return where it is: `.dropped_NAME` beside it."""
    dropped = folder.with_name(f".dropped_{folder.name}")
    if dropped.exists():
        shutil.rmtree(dropped)
    folder.rename(dropped)
    return dropped
