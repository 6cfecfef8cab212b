"""Calls that are made together: what comes up in one tick of the event loop goes out as one call.

A call to an actor costs each side about a millisecond, however short it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from yatt_mm.generation.phase_calls import PhaseCalls

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Reply = TypeVar("Reply")


class TickBatch(Generic[Key, Item, Reply]):
    """Collects items until the event loop has handled all that is ready now, then makes one call per key."""

    def __init__(
        self,
        calls: PhaseCalls,
        send: Callable[[Key, list[Item]], Awaitable[Sequence[Reply]]],
        *,
        max_items: int | None = None,
    ) -> None:
        """`send` makes one call with up to `max_items` items, and returns one reply per item, in order."""
        self._calls = calls
        self._send = send
        self._max_items = max_items
        self._waiting: dict[Key, list[tuple[Item, asyncio.Future[Reply]]]] = {}
        self._num_missing = 0
        """The number of items that `hold` waits for."""

    def hold(self, keys: Iterable[Key], num_items: int) -> None:
        """Hold the next items until `num_items` of them are there. Then make one call for each of these keys, also for
        those without an item."""
        self._waiting = {key: [] for key in keys}
        self._num_missing = num_items
        if not num_items:
            self._flush_soon()

    def add(self, key: Key, item: Item) -> asyncio.Future[Reply]:
        """Send an item at the end of this tick; after `hold`, together with all the items that `hold` waits for. Return
        the future of its reply.

        The future is cancelled if the call fails or the phase ends. Cancelling it does not end the call, which other
        items share.
        """
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        is_first = not self._waiting
        self._waiting.setdefault(key, []).append((item, reply))
        if self._num_missing:
            self._num_missing -= 1
            is_first = not self._num_missing
        if is_first:
            self._flush_soon()
        return reply

    def _flush_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        if self._calls.is_over:
            _cancel(reply for items in waiting.values() for _, reply in items)
            return
        for key, items in waiting.items():
            size = self._max_items or len(items) or 1
            for begin in range(0, len(items) or 1, size):
                self._calls.start(self._call(key, items[begin : begin + size]))

    async def _call(self, key: Key, items: Sequence[tuple[Item, asyncio.Future[Reply]]]) -> None:
        try:
            replies = await self._send(key, [item for item, _ in items])
            for (_, future), reply in zip(items, replies, strict=True):
                if not future.done():
                    future.set_result(reply)
        finally:
            _cancel(future for _, future in items)


def _cancel(futures: Iterable[asyncio.Future[Reply]]) -> None:
    """Cancel the futures that have no result, so that no coroutine waits for a reply that will not come."""
    for future in futures:
        future.cancel()
