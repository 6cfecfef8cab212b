"""Calls of a reward function, with a time limit: for each response a reward, or why there is none."""

from __future__ import annotations

import asyncio
import math
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from yatt_mm.protocol.faults import MAX_SHOWN, Fault
from yatt_mm.rewards.form import form_of
from yatt_mm.rewards.reading import Reward, read_reward
from yatt_mm.rewards.response import Response

LATE = "it took longer than"
"""The beginning of what a fault says of a function that was interrupted."""
AGAIN_S = 1.0
"""The time after which a function that does not end when it is interrupted is interrupted again."""
MAX_TRACE = 4000
"""The number of characters of a traceback that a fault keeps, from its end."""
MAX_AT_ONCE = 64
"""The most responses on which an async function works at the same time in one process."""


class RewardCall:
    """A reward function that is called safely. Use it in a process's main thread."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        deadline_s: float,
        longest_s: float = math.inf,
        weights: Mapping[str, float] | None = None,
        ranges: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """`name`: what faults call the function. `deadline_s`: the longest time for one response. `longest_s`: the
        longest time for a batch, and for all responses of an async function. `weights`, `ranges`: those of the named
        parts of a reward."""
        self.name = name
        self._function = function
        self._form = form_of(function)
        self._deadline_s = deadline_s
        self._longest_s = longest_s
        self._weights, self._ranges = weights or {}, ranges or {}
        self._runner = asyncio.Runner()

    def __call__(self, responses: Sequence[Response]) -> list[Reward | Fault]:
        """Return the reward of each response, or why it has none: the function raises, is late, or gives no finite
        number. A batch that fails gives none of its responses a reward."""
        if not responses:
            return []
        if self._form.is_async:
            return self._in_a_loop(responses)
        if self._form.is_batch:
            return self._read_batch(self._given(responses), responses)
        return [self._read(self._given([response]), response) for response in responses]

    def _in_a_loop(self, responses: Sequence[Response]) -> list[Reward | Fault]:
        """Return the rewards of an async function. One event loop serves all calls, because a function may keep
        connections between them."""
        try:
            with _time_limit(self._limit_s(responses)):  # for a function that waits without `await`
                return self._runner.run(self._all_at_once(responses))
        except _LateError as error:
            self._runner = asyncio.Runner()  # what was interrupted may be left in any state
            return [self._raised(error, response.text) for response in responses]

    def _limit_s(self, responses: Sequence[Response]) -> float:
        return min(self._deadline_s * len(responses), max(self._deadline_s, self._longest_s))

    async def _all_at_once(self, responses: Sequence[Response]) -> list[Reward | Fault]:
        if self._form.is_batch:
            return self._read_batch(await self._awaited(responses), responses)
        free = asyncio.Semaphore(MAX_AT_ONCE)

        async def one(response: Response) -> Reward | Fault:
            async with free:
                return self._read(await self._awaited([response]), response)

        return await asyncio.gather(*map(one, responses))

    def _given(self, responses: Sequence[Response]) -> Any:
        """Return what the function returns, or the fault if it raises or is late."""
        try:
            with _time_limit(self._limit_s(responses)):
                first, named = self._form.arguments(responses)
                return self._function(*first, **named)
        except (Exception, _LateError) as error:  # what a user's function raises is reported, and the caller decides
            return self._raised(error, responses[0].text)

    async def _awaited(self, responses: Sequence[Response]) -> Any:
        limit_s = self._limit_s(responses)
        try:
            first, named = self._form.arguments(responses)
            async with asyncio.timeout(limit_s) as limit:
                return await self._function(*first, **named)
        except Exception as error:  # what a user's function raises is reported, and the caller decides
            late = isinstance(error, TimeoutError) and limit.expired()
            return self._raised(_LateError(_late(limit_s)) if late else error, responses[0].text)

    def _read(self, given: Any, response: Response) -> Reward | Fault:
        if isinstance(given, Fault):
            return given
        try:
            return read_reward(given, self._weights, self._ranges)
        except ValueError as error:
            return Fault(what=str(error), where=self.name, response=response.text[:MAX_SHOWN])

    def _read_batch(self, given: Any, responses: Sequence[Response]) -> list[Reward | Fault]:
        if not isinstance(given, Fault) and (not isinstance(given, Sequence) or len(given) != len(responses)):
            what = f"a list of {len(given)}" if isinstance(given, Sequence) else f"a {type(given).__name__}"
            given = Fault(
                what=f"it returned {what} for {len(responses)} responses; wanted a list with one reward for each",
                where=self.name,
                response=responses[0].text[:MAX_SHOWN],
            )
        if isinstance(given, Fault):
            return [given for _ in responses]
        return [self._read(one, response) for one, response in zip(given, responses)]

    def _raised(self, error: BaseException, text: str) -> Fault:
        """Return the fault of an exception, with the part of its traceback that is inside the function."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename != __file__ and not _is_of_asyncio(frame)]
        trace = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)])
        return Fault(
            what=str(error) if isinstance(error, _LateError) else f"{type(error).__name__}: {error}",
            where=f"{own[-1].filename}:{own[-1].lineno}" if own else self.name,
            response=text[:MAX_SHOWN],
            trace=trace[-MAX_TRACE:],
        )


def _is_of_asyncio(frame: traceback.FrameSummary) -> bool:
    return frame.filename in (asyncio.timeouts.__file__, asyncio.runners.__file__)


class _LateError(BaseException):
    """The function was interrupted, because it took too long. It is no Exception, so that no library that the function
    calls takes it for one of its own."""


def _late(seconds: float) -> str:
    return f"{LATE} {seconds:g} s (reward.deadline_s)"


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_LateError` inside the block when it takes longer. It works only in a process's main thread, which Ray
    uses."""

    def interrupt(signum: int, frame: object) -> None:
        raise _LateError(_late(seconds))

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
