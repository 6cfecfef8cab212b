"""The marks that keep durable objects alive: empty files, one folder per scope, and the folder `held` for held objects.

    HELD/MARK            an object (named as its file) that is held
    KEY/MARK             an object that a scope keeps
    KEY/scope.json       the scope: name, quota_bytes, owners

The marks say nothing about the objects. Damage elsewhere never removes a mark.

A mark is removed in two steps: `unmark` and `forget_scope` only note it, because the store's lock is held then, and
`remove_unwanted` does it. The caller that released the object gets its reply after that. A mark that is made in between
stays.
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
    method that uses the disk may raise OSError."""

    def __init__(self, directory: Path, objects: Path) -> None:
        self._directory, self._objects = directory, objects
        self._making = threading.Lock()
        """Held while files are made and removed here."""
        self._states: dict[Path, str] = {}
        """The scope states that this node wrote. States that an earlier node wrote are not here, because they may
        belong to another scope of the same name."""
        self._noting = threading.Lock()
        """Guards the following, and is never held while the disk works."""
        self._made: dict[Path, set[str]] = {}
        """The marks that this node made, by folder."""
        self._unwanted: dict[Path, set[str]] = {}
        """The marks that are to be removed, by folder."""
        self._closed: set[Path] = set()
        """The folders of closed scopes, which are to be removed."""
        (directory / HELD).mkdir(parents=True, exist_ok=True)

    def keep(self, path: Path, scope: Scope | None) -> Path:
        """Mark a durable file as kept by `scope`, or as held if that is None. The mark counts once the returned folder
        is synced.

        MissingObjectError if the scope was closed.
        """
        folder, mark = self._folder(scope), path.stem
        if self._is_made(folder, mark):
            return folder
        with self._making:  # no object is acknowledged without the scope's state, and a closed scope stays closed
            away = None
            if scope is not None:
                if not scope.is_open:
                    raise MissingObjectError(
                        f"scope {scope.name!r} was closed while an object was being written into it"
                    )
                away = self._move_closed(folder)
                if not folder.exists():
                    folder.mkdir()
                    sync_directory(self._directory)
                self._write_state(folder, scope)
            with self._noting:
                self._unwanted.get(folder, set()).discard(mark)
            (folder / mark).touch()
            with self._noting:
                self._made.setdefault(folder, set()).add(mark)
        _remove_tree(away)
        return folder

    def discard(self, path: Path, scope: Scope | None) -> None:
        """Remove now the mark that `keep` made for a file that no other caller knows."""
        folder = self._folder(scope)
        with self._noting:
            self._made.get(folder, set()).discard(path.stem)
        (folder / path.stem).unlink(missing_ok=True)

    def unmark(self, path: Path, scope: Scope | None) -> None:
        """Note that the mark that `keep` made is to be removed. Uses no disk."""
        with self._noting:
            self._unwanted.setdefault(self._folder(scope), set()).add(path.stem)

    def forget(self, path: Path) -> None:
        """Remove every mark of a file."""
        for folder in self._directory.iterdir():
            (folder / path.stem).unlink(missing_ok=True)

    def update_scope(self, scope: Scope) -> None:
        """Note that a scope was opened, perhaps again. If it keeps anything here, its state is on the disk when this
        returns."""
        folder, away = self._folder(scope), None
        with self._making:
            if scope.is_open:
                away = self._move_closed(folder)
                if folder.exists():
                    self._write_state(folder, scope)
        _remove_tree(away)

    def forget_scope(self, scope: Scope) -> None:
        """Note that all marks of a scope, which is not open any more, are to be removed. Uses no disk."""
        with self._noting:
            self._closed.add(self._folder(scope))

    def remove_unwanted(self) -> None:
        """Remove what `unmark` and `forget_scope` noted. It is gone when this returns, also if another thread removes
        it."""
        while True:
            with self._making:
                found = self._take_unwanted()
                if found is None:
                    return
                folder, mark = found
                away = self._move_closed(folder) if mark is None else None
                if mark is not None:
                    (folder / mark).unlink(missing_ok=True)
            _remove_tree(away)

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
        _remove_tree(_move_away(folder))

    def _take_unwanted(self) -> tuple[Path, str | None] | None:
        """Return the folder of a closed scope, or a folder and a mark in it that is to be removed; None if there is
        nothing."""
        with self._noting:
            for folder in self._closed:
                return folder, None
            while self._unwanted:
                folder, marks = next(iter(self._unwanted.items()))
                if marks:
                    mark = marks.pop()
                    self._made.get(folder, set()).discard(mark)
                    return folder, mark
                del self._unwanted[folder]
        return None

    def _is_made(self, folder: Path, mark: str) -> bool:
        """Return True if this node made the mark and it is wanted."""
        with self._noting:
            is_unwanted = folder in self._closed or mark in self._unwanted.get(folder, ())
            return not is_unwanted and mark in self._made.get(folder, ())

    def _move_closed(self, folder: Path) -> Path | None:
        """Move the folder of a closed scope away and return where it is; None if this folder is not one. `_making` is
        held."""
        with self._noting:
            if folder not in self._closed:
                return None
            self._closed.discard(folder)
            self._made.pop(folder, None)
            self._unwanted.pop(folder, None)
        self._states.pop(folder, None)
        return _move_away(folder) if folder.exists() else None


def _move_away(folder: Path) -> Path:
    """Rename a folder that goes, so that it goes completely or not at all, also if the process dies in between. Return
    its new path."""
    away = folder.with_name(f".{secrets.token_hex(8)}")
    return folder.rename(away)


def _remove_tree(away: Path | None) -> None:
    """Remove a folder that `_move_away` renamed."""
    if away is not None:
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
