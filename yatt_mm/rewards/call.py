"""One call of a reward function, with a time limit: a score, or why there is none."""

from __future__ import annotations

import math
import signal
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from yatt_mm.protocol.faults import MAX_SHOWN, Fault
from yatt_mm.rewards.loading import RewardFunction

LATE = "it took longer than"
"""The beginning of what a fault says of a function that was interrupted."""
MAX_TRACE = 4000
"""The number of characters of a traceback that a fault keeps, from its end."""


class RewardCall:
    """A reward function that is called safely. Use it in a process's main thread."""

    def __init__(self, function: RewardFunction, *, name: str, deadline_s: float) -> None:
        """`name`: what faults call the function. `deadline_s`: the longest time of one call."""
        self.name = name
        self._function = function
        self._deadline_s = deadline_s

    def __call__(self, text: str, answer: str, fields: Mapping[str, Any]) -> float | Fault:
        """Return the reward of a response, or why it has none: the function raises, is late, or gives no finite
        number."""
        try:
            with _time_limit(self._deadline_s):
                given = self._function(text, answer, dict(fields))  # a copy, which the function may change
        except Exception as error:  # the function is the user's: what it raises is reported, and the caller decides
            return self._raised(error, text)
        try:
            reward = float(given)
        except (TypeError, ValueError):
            reward = math.nan
        if math.isfinite(reward):
            return reward
        what = f"it returned {repr(given)[:MAX_SHOWN]}, a {type(given).__name__}; wanted a finite number"
        return Fault(what=what, where=self.name, response=text[:MAX_SHOWN])

    def _raised(self, error: Exception, text: str) -> Fault:
        """Return the fault of an exception, with the part of its traceback that is inside the function."""
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is that of the call here
        own = [frame for frame in frames if frame.filename != __file__]
        trace = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)])
        return Fault(
            what=str(error) if isinstance(error, _LateError) else f"{type(error).__name__}: {error}",
            where=f"{own[-1].filename}:{own[-1].lineno}" if own else self.name,
            response=text[:MAX_SHOWN],
            trace=trace[-MAX_TRACE:],
        )


class _LateError(TimeoutError):
    """The function was interrupted, because it took too long."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_LateError` inside the block when it takes longer. It works only in a process's main thread, which Ray
    uses."""

    def interrupt(signum: int, frame: object) -> None:
        raise _LateError(f"{LATE} {seconds:g} s (reward.deadline_s)")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
