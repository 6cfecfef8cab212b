"""How much a process has done, as a number that others on its machine read from a file. A process whose number stands
still although it has work hangs. It can be made to write down where."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from yatt_mm.common.log_file import log_names

T = TypeVar("T")

LAYOUT = struct.Struct("<qqqd")
"""The number of the process, when it was started, how much it has done, and when it did the last of it."""
STACK_SIGNAL = signal.SIGUSR2
"""The signal after which a process writes the stacks of its threads to its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What one process has done."""

    pid: int
    started: int
    """When it was started, in ticks of the system's clock: its number may be that of another process later."""
    count: int
    last_s: float
    """The time of the last piece of work, in seconds since the epoch."""


class Progress:
    """Counts what this process does. Without a file it does nothing."""

    def __init__(self) -> None:
        self._count = 0
        self._file: mmap.mmap | None = None
        self._pid = self._started = 0

    def open(self, path: Path) -> None:
        """From now on show in a file what this process does, and let `STACK_SIGNAL` write its stacks."""
        self._pid, self._started = os.getpid(), start_ticks(os.getpid())
        path.write_bytes(LAYOUT.pack(self._pid, self._started, 0, time.time()))
        with path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), LAYOUT.size)
        faulthandler.register(STACK_SIGNAL, all_threads=True)

    def tick(self) -> None:
        """Note that a piece of work is done: a microbatch, a tensor, a part of a file."""
        if self._file is not None:
            self._count += 1
            LAYOUT.pack_into(self._file, 0, self._pid, self._started, self._count, time.time())

    def ticking(self, pieces: Iterable[T]) -> Iterator[T]:
        """Yield the same pieces, and note each of them."""
        for piece in pieces:
            yield piece
            self.tick()


PROGRESS = Progress()
"""The only instance of a process."""


def progress_path(log_name: str, folder: Path | None = None) -> Path:
    """Return the file of the process that writes this log. `folder`: that for the run's temporary files, which is the
    default one in all processes of a run but the launcher."""
    return (folder or Path(tempfile.gettempdir())) / f"progress-{log_name.removesuffix('.log')}"


def progress_of(name: str, folder: Path | None = None) -> Done | None:
    """Return what the part of the run that errors call `name` has done; None if there is none yet. `folder`: see
    `progress_path`."""
    logs = log_names(name)
    return read_progress(progress_path(logs[0], folder)) if logs else None


def read_progress(path: Path) -> Done | None:
    """Return what a process has done; None if there is none yet."""
    try:
        pid, started, count, last_s = LAYOUT.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return Done(pid=pid, started=started, count=count, last_s=last_s)


def signal_part(name: str, number: int, folder: Path | None = None) -> None:
    """Send a signal to the process of the part of the run that errors call `name`, if it is on this machine and has not
    ended. `folder`: see `progress_path`."""
    done = progress_of(name, folder)
    if done is None:
        return
    with suppress(ProcessLookupError):
        process = os.pidfd_open(done.pid)  # from here on it means this process, and no other
        try:
            if start_ticks(done.pid) == done.started:
                signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)


def start_ticks(pid: int) -> int:
    """Return when a process was started, in ticks of the system's clock; -1 if it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return -1
    return int(after_name.split()[19])
