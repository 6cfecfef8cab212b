"""Blocking calls that are made together: what coroutines ask for in one tick of the event loop goes out as one call in
a thread.

Groups begin and end in bunches. A call for each of them would cost the node a thread, and many threads at once make
each other wait.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Reply = TypeVar("Reply")


class TickCalls(Generic[Item, Reply]):
    """Calls one function with all items of a tick. Used from one event loop."""

    def __init__(
        self,
        function: Callable[[list[Item]], Sequence[Reply]],
        threads: Executor,
        *,
        size_of: Callable[[Item], int],
        max_size: int,
        errors_of_one: tuple[type[Exception], ...],
    ) -> None:
        """`function` gets items of up to `max_size` together, or one larger item, and returns one reply per item, in
        order. `size_of` gives the size of an item.

        `errors_of_one`: what the function raises if one item is at fault. It is then called again with each of the
        items alone, so that one does not fail the others. Any other error is the error of all items.
        """
        self._function = function
        self._threads = threads
        self._size_of = size_of
        self._max_size = max_size
        self._errors_of_one = errors_of_one
        self._waiting: list[tuple[Item, asyncio.Future[Reply]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(self, item: Item) -> Reply:
        """Return the reply to one item. Raises what the function raises."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._flush)
        reply: asyncio.Future[Reply] = loop.create_future()
        self._waiting.append((item, reply))
        try:
            return await reply
        finally:
            del reply  # an error's traceback holds this frame, which must not hold the error

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        batch: list[tuple[Item, asyncio.Future[Reply]]] = []
        size = 0
        for asked in waiting:
            size += self._size_of(asked[0])
            if batch and size > self._max_size:
                self._start(batch)
                batch, size = [], self._size_of(asked[0])
            batch.append(asked)
        self._start(batch)

    def _start(self, asked: Sequence[tuple[Item, asyncio.Future[Reply]]]) -> None:
        call = asyncio.create_task(self._call(asked))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, asked: Sequence[tuple[Item, asyncio.Future[Reply]]]) -> None:
        items = [item for item, _ in asked]
        replies: Sequence[Reply] = ()
        try:
            replies = await asyncio.get_running_loop().run_in_executor(self._threads, self._function, items)
            for (_, future), reply in zip(asked, replies, strict=True):
                if not future.done():
                    future.set_result(reply)
        except Exception as error:
            if len(asked) > 1 and isinstance(error, self._errors_of_one):
                await asyncio.gather(*(self._call([one]) for one in asked))
                return
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
        finally:
            for _, future in asked:
                future.cancel()  # those that have no reply yet would wait for ever
            # an error's traceback holds this frame, which must hold neither the error nor the other items' replies
            asked, items, replies, future, reply = (), [], (), None, None  # type: ignore[assignment]
