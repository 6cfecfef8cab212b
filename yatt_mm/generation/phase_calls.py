"""The calls of one generation phase to other actors: they end together, and none of them waits without a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from yatt_mm.common.errors import WorkerError
from yatt_mm.common.ray_calls import reply_of

POLL_S = 1.0
SIGN_OF_LIFE_S = 1.0
"""The shortest time between two signs of life."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    name: str
    what: str
    is_progress: bool


class PhaseCalls:
    """The tasks and calls of one phase; `open_calls` makes one. The first failure ends all of them."""

    def __init__(self, tasks: asyncio.TaskGroup, *, deadline_s: float, on_progress: Callable[[], object]) -> None:
        self.is_over = False
        """True when the phase ends: nothing new may be sent."""
        self.on_late: Callable[[], bool] = lambda: False
        """Called when nothing has ended for too long; True if it did something about it."""
        self._tasks = tasks
        self._deadline_s = deadline_s
        self._on_progress = on_progress
        self._told_s = float("-inf")
        self._last_s = time.monotonic()
        self._started: set[asyncio.Task[Any]] = set()
        self._open: set[_Open] = set()

    def start(self, way: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine until it or the phase ends. If it fails, the phase fails."""
        task = self._tasks.create_task(self._run(way))
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return task

    async def finish(self) -> None:
        """Wait until every call that was started has ended, also those that start in the present tick of the event
        loop."""
        await asyncio.sleep(0)
        while self._started:
            await asyncio.wait(self._started)

    async def reply(self, call: Awaitable[T], *, name: str, what: str, deadline_s: float | None = None) -> T:
        """Return the result of a call to the worker `name`.

        A call with its own `deadline_s` does not extend the deadline of the others by its result.

        Raises:
            WorkerError: the worker raised or died. When no call ends for `deadline_s`, the whole phase ends with this
                error.
        """
        is_progress = deadline_s is None
        mine = _Open(name, what, is_progress)
        if is_progress and not self._is_working:
            self._last_s = time.monotonic()
        self._open.add(mine)
        try:
            return await reply_of(call, name=name, what=what, deadline_s=deadline_s)
        finally:
            self._open.discard(mine)
            if is_progress:
                self._note_progress()

    @property
    def _is_working(self) -> bool:
        return any(call.is_progress for call in self._open)

    def _note_progress(self) -> None:
        self._last_s = time.monotonic()
        if self._last_s - self._told_s >= SIGN_OF_LIFE_S and not self.is_over:
            self._told_s = self._last_s
            self._on_progress()

    async def _run(self, way: Coroutine[Any, Any, T]) -> T:
        try:
            return await way
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.is_over or task is None or task.cancelling():
                raise
            self.is_over = True  # without an error, what waits for this one would wait for ever
            raise WorkerError("a call was cancelled, though not by its phase; see the workers' logs") from None
        except Exception:
            self.is_over = True
            raise

    async def _watch(self) -> None:
        """Raise WorkerError if calls are open and none of them ends for `deadline_s`."""
        while True:
            await asyncio.sleep(POLL_S)
            if not self._is_working or time.monotonic() - self._last_s <= self._deadline_s:
                continue
            if not self.on_late():
                names = ", ".join(sorted({f"{call.name} ({call.what})" for call in self._open}))
                raise WorkerError(
                    f"nothing ended for {self._deadline_s:g} s (controllers.deadline_s); waited for {names}"
                )
            self._last_s = time.monotonic()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Watch the calls during a block, and end everything that is still under way at its end."""
        watch = self._tasks.create_task(self._run(self._watch()))
        try:
            yield
        finally:
            self.is_over = True
            for task in (watch, *self._started):
                task.cancel()


@asynccontextmanager
async def open_calls(*, deadline_s: float, on_progress: Callable[[], object]) -> AsyncIterator[PhaseCalls]:
    """Open the calls of a phase for an `async with` block. What is still under way at its end is cancelled.

    `on_progress` is called while results arrive, though not for each one: it is a sign of life.

    Raises:
        WorkerError: a worker failed, or nothing has ended for `deadline_s`. Of several failures it is the first.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            calls = PhaseCalls(tasks, deadline_s=deadline_s, on_progress=on_progress)
            with calls._watched():
                yield calls
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
