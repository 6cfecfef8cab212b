"""What keeps the durable objects of a node alive: empty files, in a folder per scope, and in `held` for what is held.

    HELD/MARK            an object, named as its file is, that somebody holds
    KEY/MARK             one that a scope keeps
    KEY/scope.json       the scope: name, quota_bytes, keep, owners

Says nothing of the objects themselves. No mark is taken away because of something else that is damaged.
"""

import json
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from dataplane.core.errors import MissingObjectError
from dataplane.storage.group_commit import sync_directory
from dataplane.storage.scopes import Scope

HELD = "held"
_STATE = "scope.json"

log = logging.getLogger(__name__)


class RetentionMarks:
    """The marks in a folder, of the object files in another one. Thread-safe; every method may raise OSError."""

    def __init__(self, directory: Path, objects: Path) -> None:
        self._directory, self._objects = directory, objects
        self._making = threading.Lock()
        self._states: dict[Path, str] = {}
        """Of the scopes whose state this node wrote: one that was found may be of another scope of that name."""
        (directory / HELD).mkdir(parents=True, exist_ok=True)

    def keep(self, path: Path, scope: Scope | None) -> Path:
        """A durable file is kept by `scope`, or held, once the folder that this returns is synced.

        MissingObjectError if the scope was closed.
        """
        folder = self._folder(scope)
        if scope is None:
            (folder / path.stem).touch()
            return folder
        with self._making:  # nothing is acknowledged without the scope's state, and a closed scope stays closed
            if not scope.is_open:
                raise MissingObjectError(f"scope {scope.name!r} was closed while an object was being written into it")
            if not folder.exists():
                folder.mkdir()
                sync_directory(self._directory)
            self._write_state(folder, scope)
            (folder / path.stem).touch()
        return folder

    def let_go(self, path: Path, scope: Scope | None) -> None:
        """The reverse of `keep`."""
        (self._folder(scope) / path.stem).unlink(missing_ok=True)

    def forget(self, path: Path) -> None:
        """Nothing keeps a file any more."""
        for folder in self._directory.iterdir():
            (folder / path.stem).unlink(missing_ok=True)

    def update_scope(self, scope: Scope) -> None:
        """A scope was opened, perhaps once more: what it says of itself is on the disk if it keeps anything there."""
        folder = self._folder(scope)
        with self._making:
            if scope.is_open and folder.exists():
                self._write_state(folder, scope)

    def forget_scope(self, scope: Scope) -> None:
        """A scope, which is not open any more, keeps nothing."""
        folder = self._folder(scope)
        with self._making:
            self._states.pop(folder, None)
            if folder.exists():
                self._remove(folder)

    def read(self) -> dict[str, dict[str, Mapping[str, Any]]]:
        """Per object that has a file, by mark, what keeps it: `held`, or the key and state of a scope.

        What a scope keeps that is damaged is held instead. Call it before anything else.
        """
        kept: dict[str, dict[str, Mapping[str, Any]]] = {}
        for folder in list(self._directory.iterdir()):
            marks = [mark.name for mark in folder.iterdir() if (self._objects / f"{mark.name}.arrow").exists()]
            keeper = folder.name
            state: Mapping[str, Any] = {}
            if keeper != HELD:
                if keeper.startswith(".") or not marks:
                    shutil.rmtree(folder, ignore_errors=True)
                    continue
                found = _read_state(folder)
                if found is None:
                    self._hold_instead(folder, marks)
                    keeper = HELD
                else:
                    state = found
            for mark in marks:
                kept.setdefault(mark, {})[keeper] = state
        return kept

    def _folder(self, scope: Scope | None) -> Path:
        return self._directory / (HELD if scope is None else _key(scope.name))

    def _write_state(self, folder: Path, scope: Scope) -> None:
        state = {"name": scope.name, "quota_bytes": scope.quota_bytes, "keep": scope.is_kept}
        text = json.dumps({**state, "owners": sorted(scope.owners)})
        if self._states.get(folder) == text:
            return
        temporary = folder / f".{_STATE}"
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or the name may last and the content not
        temporary.replace(folder / _STATE)
        sync_directory(folder)
        self._states[folder] = text

    def _hold_instead(self, folder: Path, marks: list[str]) -> None:
        log.error("%s is damaged: the %d durable objects in it are held; release those not wanted", folder, len(marks))
        for mark in marks:
            (self._directory / HELD / mark).touch()
        sync_directory(self._directory / HELD)
        self._remove(folder)

    def _remove(self, folder: Path) -> None:
        """All of it or nothing, however this ends."""
        away = folder.with_name(f".{secrets.token_hex(8)}")
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def _key(name: str) -> str:
    """A folder's name for a scope."""
    return blake3(name.encode()).hexdigest()[:24]


def _read_state(folder: Path) -> Mapping[str, Any] | None:
    """None where it is not whole; OSError where that cannot be told."""
    try:
        state = json.loads((folder / _STATE).read_text())
        is_whole = _key(state["name"]) == folder.name and {"quota_bytes", "keep", "owners"} <= set(state)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return state if is_whole else None
