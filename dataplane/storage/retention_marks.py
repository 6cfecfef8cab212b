"""The marks that keep durable objects alive: empty files, one folder per scope, and the folder `held` for held objects.

    HELD/MARK            an object (named as its file) that is held
    KEY/MARK             an object that a scope keeps
    KEY/scope.json       the scope: name, quota_bytes, owners

The marks say nothing about the objects. Damage elsewhere never removes a mark.
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

from dataplane.core.disk_sync import sync_directory
from dataplane.core.errors import MissingObjectError
from dataplane.storage.scopes import Scope

HELD = "held"
_STATE = "scope.json"

log = logging.getLogger(__name__)


class RetentionMarks:
    """Empty files ("marks") in one folder that say what keeps each object file in another folder. Thread-safe; every
    method may raise OSError."""

    def __init__(self, directory: Path, objects: Path) -> None:
        self._directory, self._objects = directory, objects
        self._making = threading.Lock()
        self._states: dict[Path, str] = {}
        """The scope states that this node wrote. States that an earlier node wrote are not here, because they may
        belong to another scope of the same name."""
        (directory / HELD).mkdir(parents=True, exist_ok=True)

    def keep(self, path: Path, scope: Scope | None) -> Path:
        """Mark a durable file as kept by `scope`, or as held if that is None. The mark counts once the returned folder
        is synced.

        MissingObjectError if the scope was closed.
        """
        folder = self._folder(scope)
        if scope is None:
            (folder / path.stem).touch()
            return folder
        with self._making:  # no object is acknowledged without the scope's state, and a closed scope stays closed
            if not scope.is_open:
                raise MissingObjectError(f"scope {scope.name!r} was closed while an object was being written into it")
            if not folder.exists():
                folder.mkdir()
                sync_directory(self._directory)
            self._write_state(folder, scope)
            (folder / path.stem).touch()
        return folder

    def unmark(self, path: Path, scope: Scope | None) -> None:
        """Remove the mark that `keep` made."""
        (self._folder(scope) / path.stem).unlink(missing_ok=True)

    def forget(self, path: Path) -> None:
        """Remove every mark of a file."""
        for folder in self._directory.iterdir():
            (folder / path.stem).unlink(missing_ok=True)

    def update_scope(self, scope: Scope) -> None:
        """Note that a scope was opened, perhaps again. If it keeps anything here, its state is on the disk when this
        returns."""
        folder = self._folder(scope)
        with self._making:
            if scope.is_open and folder.exists():
                self._write_state(folder, scope)

    def forget_scope(self, scope: Scope) -> None:
        """Remove all marks of a scope, which is not open any more."""
        folder = self._folder(scope)
        with self._making:
            self._states.pop(folder, None)
            if folder.exists():
                self._remove(folder)

    def read(self) -> dict[str, dict[str, Mapping[str, Any]]]:
        """Return, for each object file, what keeps it: the word `held`, or a scope's key with the scope's state.

        An object of a scope whose state is damaged is held instead. Call this before any other method.
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
        text = json.dumps({"name": scope.name, "quota_bytes": scope.quota_bytes, "owners": sorted(scope.owners)})
        if self._states.get(folder) == text:
            return
        temporary = folder / f".{_STATE}"
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # without this sync the name may survive a crash and the content may not
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
        """Remove the folder completely or not at all, also if the process dies in between."""
        away = folder.with_name(f".{secrets.token_hex(8)}")
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def _key(name: str) -> str:
    """Return the folder name for a scope."""
    return blake3(name.encode()).hexdigest()[:24]


def _read_state(folder: Path) -> Mapping[str, Any] | None:
    """Return the state of the scope of this folder, or None if its file is damaged. OSError if it cannot be read."""
    try:
        state = json.loads((folder / _STATE).read_text())
        is_whole = _key(state["name"]) == folder.name and {"quota_bytes", "owners"} <= set(state)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return state if is_whole else None
