"""A holder for a worker whose start takes long, in an actor that may be shut down during that start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

W = TypeVar("W")


class StartingWorker(Generic[W]):
    """Starts a worker, holds it, and ends it, also during its start."""

    def __init__(self, name: str) -> None:
        """`name`: what errors call the actor."""
        self._name = name
        self._start: asyncio.Task[W] | None = None

    async def start(self, starting: Coroutine[Any, Any, W]) -> None:
        """Start the worker and wait for it. Unblocked by: the started worker, its failure, or `end`."""
        self._start = asyncio.create_task(starting)
        await self._start

    @property
    def worker(self) -> W:
        """The started worker. Raises RuntimeError if it has not started."""
        if self._start is None or not self._start.done():
            raise RuntimeError(f"{self._name} has not been started")
        return self._start.result()

    async def end(self, shutdown: Callable[[W], Awaitable[None]]) -> None:
        """Cancel the start if it is under way, else call `shutdown` with the worker."""
        if self._start is None:
            return
        self._start.cancel()
        await asyncio.wait([self._start])
        if not self._start.cancelled() and self._start.exception() is None:
            await shutdown(self._start.result())
