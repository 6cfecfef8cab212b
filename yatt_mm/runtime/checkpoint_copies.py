"""Copies committed checkpoints to a URL while the run goes on. A thread of the launcher does it.

A copy is read back and compared with the checkpoint's manifest, which comes last: a copy without one does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from blake3 import blake3

from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.errors import CheckpointError
from yatt_mm.common.manifest import CHUNK_BYTES, MANIFEST_FILE, FileRecord, files_of
from yatt_mm.runtime.signals import on_signals, signals_restored

POLL_S = 0.5
"""The seconds between two looks for another checkpoint."""
FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0
"""The first and the longest pause before what failed is tried again; each is twice as long as the one before."""
LAST_FILE_S = 600.0
"""The seconds after the end of the run in which another file must be copied."""


class CheckpointCopies:
    """The copies of one run's checkpoints. Use it as a context manager; the end of the block waits for the copies,
    unless it is left by an exception: the next start of the run copies what is missing."""

    def __init__(self, checkpoints: Checkpoints, url: str, tell: Callable[[str], None]) -> None:
        """`tell` gets a line about what failed. Raises ValueError or ImportError if fsspec has nothing for the URL."""
        from fsspec.core import url_to_fs  # most runs copy nothing

        self._checkpoints = checkpoints
        self._url = url.rstrip("/")
        self._tell = tell
        self._fs: Any
        self._fs, self._root = url_to_fs(self._url)
        self._copied: set[int] = set()
        self._num_files = 0
        self._is_over = threading.Event()
        self._is_given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copies of checkpoints", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._is_over.set()
        if error is None:
            self._wait()
        self._is_given_up.set()

    def _wait(self) -> None:
        """Wait for the copies, as long as files are copied, or until a signal comes."""
        num, since_s = self._num_files, time.monotonic()
        with signals_restored():
            on_signals(lambda *_: self._is_given_up.set())
            while self._thread.is_alive() and time.monotonic() - since_s < LAST_FILE_S:
                if self._is_given_up.is_set():
                    break
                self._thread.join(POLL_S)
                if self._num_files > num:
                    num, since_s = self._num_files, time.monotonic()
        if missing := [step for step in self._checkpoints.steps() if step not in self._copied]:
            steps = ", ".join(map(str, missing))
            self._tell(f"checkpoint.copy_to: {self._url} has no copy of step {steps}; see {self._checkpoints.root}")

    def _run(self) -> None:
        pause_s, said = FIRST_PAUSE_S, ""
        while not self._is_given_up.is_set():
            is_over = self._is_over.is_set()  # before the look: later there is no other checkpoint
            left = [step for step in self._checkpoints.steps() if step not in self._copied]
            if not left:
                if is_over:
                    return
                self._is_over.wait(POLL_S)
                continue
            step = left[-1]
            try:
                self._copy(step)
            except Exception as error:  # each filesystem has errors of its own
                if step not in self._checkpoints.steps():
                    continue  # it was dropped meanwhile, because there are newer ones
                if str(error) != said:
                    said = str(error)
                    self._tell(f"checkpoint.copy_to: {self._url} did not take step {step} ({said}); trying again")
                self._is_given_up.wait(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
            else:
                self._copied.add(step)
                pause_s, said = FIRST_PAUSE_S, ""

    def _copy(self, step: int) -> None:
        folder = self._checkpoints.folder(step)
        files, manifest = files_of(folder), (folder / MANIFEST_FILE).read_bytes()
        target = self._target(folder, manifest)
        if target is None:
            return
        for name, record in files.items():
            if self._is_given_up.is_set():
                return
            self._copy_file(folder / name, f"{target}/{name}", record)
            self._num_files += 1
        self._fs.pipe_file(f"{target}/{MANIFEST_FILE}", manifest)

    def _target(self, folder: Path, manifest: bytes) -> str | None:
        """Return where a checkpoint goes; None if it is there already. Where another one with its name is, such as that
        of an earlier run, it gets a name of its own."""
        own = blake3(manifest).hexdigest(8)
        for target in (f"{self._root}/{folder.name}", f"{self._root}/{folder.name}.{own}"):
            there = f"{target}/{MANIFEST_FILE}"
            if not self._fs.exists(there):
                return target
            if self._fs.cat_file(there) == manifest:
                return None
        raise CheckpointError(f"{target} has another manifest than its name says")

    def _copy_file(self, path: Path, target: str, record: FileRecord) -> None:
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), target)
        digest, nbytes = blake3(), 0
        with self._fs.open(target, "rb", block_size=CHUNK_BYTES, cache_type="readahead") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                nbytes += len(chunk)
        if FileRecord(nbytes=nbytes, blake3=digest.hexdigest()) != record:
            raise CheckpointError(f"{target} is not what was written: it has {nbytes} bytes of {record.nbytes}")
