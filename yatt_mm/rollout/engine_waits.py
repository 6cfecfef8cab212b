"""Bounds on the waits of one engine, by the clock or by the engine's progress; all of them can be ended at once.

Left out: what a wait was for and what its end means, which the engine says.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_MOMENT_S = 0.05
"""In which an event loop that was held up hears of what was finished meanwhile."""


class EngineWaits:
    """Belongs to one event loop. A bound that is reached raises TimeoutError in the code under it."""

    def __init__(self) -> None:
        self._bounds: set[asyncio.Timeout] = set()
        self._last_progress = float("-inf")

    def note_progress(self) -> None:
        """Something was finished: all that `while_progressing` bounds have their whole time again."""
        self._last_progress = asyncio.get_running_loop().time()

    def end_all(self) -> None:
        """Reach every bound now; those that were reached already are left alone."""
        for bound in self._bounds:
            if not bound.expired():
                bound.reschedule(0)

    @asynccontextmanager
    async def at_most(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """A wait of `seconds`, whatever happens meanwhile; None is as long as nobody ends it."""
        async with asyncio.timeout(seconds) as bound:
            self._bounds.add(bound)
            try:
                yield bound
            finally:
                self._bounds.discard(bound)

    @asynccontextmanager
    async def while_progressing(self, seconds: float) -> AsyncIterator[None]:
        """A wait that is over when nothing at all was finished for `seconds`."""
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
