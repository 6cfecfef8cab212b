"""A few parser processes, started when they are needed.

Each does one task at a time, so that a crash, a time limit and the memory limit belong to one file. There is one
process as long as it keeps up: another is started for a task that waited `GROW_AFTER_S`, and those that are idle
afterwards end, but for `NUM_KEPT`. Tasks that open whole files never take the last place, so that reading rows does not
wait for them.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dataplane.core.errors import DatasetError, NodeTimeoutError
from dataplane.datasets.formats.parser import Reply, TaskLimits
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.parsing.bad_files import BadFiles
from dataplane.datasets.parsing.frames import OverdueError
from dataplane.datasets.parsing.process import ParserDiedError, ParserProcess

MAX_ATTEMPTS = 2
NUM_KEPT = 2
"""The number of idle processes that stay."""
GROW_AFTER_S = 0.2
"""The time in seconds that a task waits for a busy process before another one is started; a start takes as long."""
QUEUE_TIMEOUT_S = 3600.0
"""The time in seconds that a task waits for a place. Those before it have time limits of their own."""

log = logging.getLogger(__name__)


def max_parsers() -> int:
    """Return the maximum number of parser processes on this machine."""
    return max(2, min(8, 2 * (os.cpu_count() or 1)))


class ParserPool:
    """Does tasks in parser processes. Thread-safe. A process that dies is replaced, and its task is done once more; a
    file that ends two processes is not tried again."""

    def __init__(self, max_processes: int | None = None) -> None:
        self._max = max_processes or max_parsers()
        self._bad = BadFiles()
        self._changed = threading.Condition()
        self._idle: list[ParserProcess] = []
        self._all: set[ParserProcess] = set()
        self._num_places = 0
        """The number of processes, those that are being started included."""
        self._num_opening = 0
        self._is_starting = False
        self._started_at = 0.0
        self._num_restarts = 0
        self._is_closed = False
        # a process ends with the thread that starts it, so that thread must live as long as the pool
        self._starter = ThreadPoolExecutor(1, "parsers")

    def call(
        self,
        task: str,
        file: RangeFile,
        arguments: Mapping[str, Any],
        take: Callable[[Reply], None],
        limits: TaskLimits,
    ) -> None:
        """Do a task, and give each reply to `take`.

        Raises DatasetError if the task fails, takes too long, or ends the process that does it twice; NodeTimeoutError
        if the node stops. Waits for: a process.
        """
        self._bad.check(file)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            parser = self._take(is_opening=limits.is_opening)
            try:
                parser.call(task, file, arguments, take, limits)
                return
            except OverdueError as error:
                self._note_loss(parser, file, f"it took more than {limits.timeout_s:.0f} s")
                raise self._bad.note_overdue(file, limits.timeout_s) from error
            except ParserDiedError as error:
                self._note_loss(parser, file, str(error))
                if error.was_asked:
                    failed = self._bad.note_death(file, error.code)
                    if attempt == MAX_ATTEMPTS:
                        raise failed from error
            finally:
                self._give_back(parser, is_opening=limits.is_opening)
        raise DatasetError(f"{file.path} was not parsed: {MAX_ATTEMPTS} parsers died before they were asked; try again")

    def close(self) -> None:
        """End all processes. Tasks that run now fail. Waits for the processes."""
        with self._changed:
            self._is_closed = True
            parsers = list(self._all)
            self._changed.notify_all()
        for parser in parsers:
            parser.close()
        self._starter.shutdown(wait=True)
        with self._changed:
            parsers = list(self._all)  # one that was being started
            self._all.clear()
        for parser in parsers:
            parser.close()

    def pids(self) -> list[int]:
        """Return the process ids of the processes."""
        with self._changed:
            return [parser.pid for parser in self._all]

    def stat(self) -> dict[str, int]:
        """Return the number of processes, and how many died or were ended in the middle of a task so far."""
        with self._changed:
            return {"num_parsers": len(self._all), "num_parser_restarts": self._num_restarts}

    def _take(self, *, is_opening: bool) -> ParserProcess:
        """Return a process that no other thread uses. Waits for: one that is idle, or one more."""
        asked_at = time.monotonic()
        while True:
            parser = self._wait_for_place(asked_at, is_opening=is_opening) or self._start(is_opening=is_opening)
            if parser.is_alive:
                return parser
            self._note_loss(parser, None, "it died while it was idle")
            self._give_back(parser, is_opening=is_opening)

    def _wait_for_place(self, asked_at: float, *, is_opening: bool) -> ParserProcess | None:
        """Take a place, and return its process; None if the caller must start it."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise NodeTimeoutError("the node is stopping; ask another one")
                now = time.monotonic()
                if now >= asked_at + QUEUE_TIMEOUT_S:
                    raise NodeTimeoutError(f"all {self._max} parsers are busy for {QUEUE_TIMEOUT_S:.0f} s; ask later")
                grows_at = max(asked_at, self._started_at) + GROW_AFTER_S
                if not is_opening or self._num_opening < self._max - 1:
                    if self._idle:
                        self._num_opening += is_opening
                        return self._idle.pop()
                    has_room = self._num_places < self._max and not self._is_starting
                    if has_room and (self._num_places == 0 or now >= grows_at):
                        self._num_opening += is_opening
                        self._num_places += 1
                        self._is_starting = True
                        return None
                self._changed.wait(grows_at - now if grows_at > now else GROW_AFTER_S)

    def _start(self, *, is_opening: bool) -> ParserProcess:
        """Start a process in a place that was taken."""
        parser: ParserProcess | None = None
        try:
            parser = self._starter.submit(ParserProcess).result()
            return parser
        except (ParserDiedError, OverdueError, OSError, RuntimeError) as error:
            raise DatasetError(f"no parser could be started: {error}; see the log of the node") from error
        finally:
            with self._changed:
                self._is_starting = False
                self._started_at = time.monotonic()
                if parser is not None:
                    self._all.add(parser)  # if the pool was closed meanwhile, `_give_back` ends it
                else:
                    self._num_places -= 1
                    self._num_opening -= is_opening
                self._changed.notify_all()

    def _give_back(self, parser: ParserProcess, *, is_opening: bool) -> None:
        """Make a process idle again, or end it if it did not finish its task or there are enough."""
        with self._changed:
            self._num_opening -= is_opening
            is_kept = parser.is_idle and parser.is_alive and not self._is_closed and len(self._idle) < NUM_KEPT
            if is_kept:
                self._idle.append(parser)
            else:
                self._num_places -= 1
                self._all.discard(parser)
            self._changed.notify_all()
        if not is_kept:
            parser.close()

    def _note_loss(self, parser: ParserProcess, file: RangeFile | None, how: str) -> None:
        parser.is_idle = False
        with self._changed:
            if self._is_closed:
                return
            self._num_restarts += 1
        log.warning("parser %d was lost%s: %s", parser.pid, f" on {file.path}" if file else "", how)
