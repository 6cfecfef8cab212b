"""A worker whose start takes long, inside an actor that may be told to end at any moment of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

W = TypeVar("W")


class StartingWorker(Generic[W]):
    """Holds the worker once it is there."""

    def __init__(self, name: str) -> None:
        """`name`: of the actor, in errors."""
        self._name = name
        self._start: asyncio.Task[W] | None = None

    async def start(self, starting: Coroutine[Any, Any, W]) -> None:
        """Unblocked by: the worker, its failure, or `end`."""
        self._start = asyncio.create_task(starting)
        await self._start

    @property
    def worker(self) -> W:
        """RuntimeError before it has started."""
        if self._start is None or not self._start.done():
            raise RuntimeError(f"{self._name} has not been started")
        return self._start.result()

    async def end(self, shutdown: Callable[[W], Awaitable[None]]) -> None:
        """Shut the worker down, also in the middle of its start."""
        if self._start is None:
            return
        self._start.cancel()
        await asyncio.wait([self._start])
        if not self._start.cancelled() and self._start.exception() is None:
            await shutdown(self._start.result())
