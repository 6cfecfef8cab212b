"""The body of a reward worker: it resolves finished groups and calls the reward function on their texts."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from dataplane.client.reader import Reader
from yatt_mm.protocol import group_record
from yatt_mm.protocol.rewards import GroupRewards, RewardTask
from yatt_mm.rewards.loading import load_reward_function

logger = logging.getLogger(__name__)


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
        rewards = [self._score_one(task, sample.text) for sample in group.samples]
        return GroupRewards(
            rewards=tuple(0.0 if reward is None else reward for reward in rewards), num_errors=rewards.count(None)
        )

    def _score_one(self, task: RewardTask, text: str) -> float | None:
        try:
            with _time_limit(self._deadline_s):
                reward = float(self._function(text, task.answer, task.fields))
        except Exception as error:  # the function is the user's: no error in it may end the run
            logger.warning("%s raised %r on the response %r; scored 0", self._name, error, text[:200])
            return None
        if not math.isfinite(reward):
            logger.warning("%s gave %r on the response %r; scored 0", self._name, reward, text[:200])
            return None
        return reward


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block when it takes longer. It works only in a process's main thread, which Ray
    uses."""

    def interrupt(signum: int, frame: object) -> None:
        raise TimeoutError(f"it took longer than {seconds:g} s (reward.deadline_s)")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
