"""The body of a reward worker: it resolves finished groups and calls the reward function on their texts."""

from __future__ import annotations

import logging
import math
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dataplane.client.reader import Reader
from yatt_mm.protocol import group_record
from yatt_mm.protocol.faults import MAX_SHOWN, Fault
from yatt_mm.protocol.rewards import GroupRewards, RewardTask
from yatt_mm.rewards.loading import load_reward_function

logger = logging.getLogger(__name__)

MAX_TRACE = 4000
"""The number of characters of a traceback that a fault keeps, from its end."""


class RewardWorker:
    """A worker that scores groups with the run's reward function. It handles one call at a time, for any number of
    groups."""

    def __init__(self, *, function: str, dataplane_uri: str, timeout_s: float, deadline_s: float) -> None:
        """`timeout_s` is for calls to the data plane, `deadline_s` for the function, per response."""
        self._name = function
        self._function = load_reward_function(function)
        self._deadline_s = deadline_s
        self._reader = Reader(dataplane_uri, timeout_s=timeout_s)

    def score(self, tasks: list[RewardTask]) -> list[GroupRewards]:
        """Return the rewards of the groups, in order.

        A response scores 0 and is counted if the function raises, takes longer than the deadline, or gives no finite
        number.
        """
        views = self._reader.resolve([task.group.ref for task in tasks])
        return [self._score_group(task, group_record.decode(view)) for task, view in zip(tasks, views)]

    def _score_group(self, task: RewardTask, group: group_record.GroupRecord) -> GroupRewards:
        scored = [self._score_one(task, sample.text) for sample in group.samples]
        faults = [fault for fault in scored if isinstance(fault, Fault)]
        return GroupRewards(
            rewards=tuple(0.0 if isinstance(reward, Fault) else reward for reward in scored),
            num_errors=len(faults),
            fault=faults[0] if faults else None,
        )

    def _score_one(self, task: RewardTask, text: str) -> float | Fault:
        """Return the reward of a response, or why it has none."""
        try:
            with _time_limit(self._deadline_s):
                given = self._function(text, task.answer, task.fields)
            reward = float(given)
        except Exception as error:  # the function is the user's: what it raises is reported, and the caller decides
            fault = self._raised(error, text)
        else:
            if math.isfinite(reward):
                return reward
            fault = Fault(what=f"it gave {reward!r}", where=self._name, response=text[:MAX_SHOWN])
        logger.warning("%s on the response %r: %s; scored 0", self._name, fault.response, fault.what)
        return fault

    def _raised(self, error: Exception, text: str) -> Fault:
        """Return the fault of an exception, with the part of its traceback that is inside the function."""
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is that of the call here
        own = [frame for frame in frames if frame.filename != __file__]
        trace = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)])
        return Fault(
            what=str(error) if isinstance(error, _LateError) else f"{type(error).__name__}: {error}",
            where=f"{own[-1].filename}:{own[-1].lineno}" if own else self._name,
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
        raise _LateError(f"it took longer than {seconds:g} s (reward.deadline_s)")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
