"""Timeouts for the waits of one engine, by the clock or by the engine's progress. All waits can be ended at once.

Left out: the error message of a timeout, which names what the engine was doing; `EngineHealth` makes it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_MOMENT_S = 0.05
"""The seconds that an event loop that was blocked gets to handle what was finished in the meantime."""


class EngineWaits:
    """The timeouts of one engine, in one event loop. A timeout raises TimeoutError in the block that it limits."""

    def __init__(self) -> None:
        self._bounds: set[asyncio.Timeout] = set()
        self._last_progress = float("-inf")

    def note_progress(self) -> None:
        """Note that something was finished: all `while_progressing` waits get their whole time again."""
        self._last_progress = asyncio.get_running_loop().time()

    def end_all(self) -> None:
        """End every wait now with TimeoutError."""
        for bound in self._bounds:
            if not bound.expired():
                bound.reschedule(0)

    @asynccontextmanager
    async def at_most(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Limit the block to `seconds` by the clock; with None only `end_all` ends it."""
        async with asyncio.timeout(seconds) as bound:
            self._bounds.add(bound)
            try:
                yield bound
            finally:
                self._bounds.discard(bound)

    @asynccontextmanager
    async def while_progressing(self, seconds: float) -> AsyncIterator[None]:
        """Limit the block: it ends when the engine has finished nothing at all for `seconds`."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        timer: asyncio.TimerHandle | None = None

        def check(was_stalled_at: float | None = None) -> None:
            nonlocal timer
            stalled_at = max(started, self._last_progress) + seconds
            if loop.time() < stalled_at:
                timer = loop.call_at(stalled_at, check)
            elif stalled_at != was_stalled_at:
                timer = loop.call_later(_MOMENT_S, check, stalled_at)
            elif not bound.expired():
                bound.reschedule(0)

        async with self.at_most(None) as bound:
            check()
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()
