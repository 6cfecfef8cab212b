"""Body of a reward worker: resolves finished groups and calls the reward function on their texts."""

from __future__ import annotations

import logging
import math

from dataplane.reader import Reader
from yatt_mm.rewards.loading import load_reward_function
from yatt_mm.rewards.messages import GroupRewards, RewardTask
from yatt_mm.rollout import record

logger = logging.getLogger(__name__)


class RewardWorker:
    """Scores groups, one call at a time."""

    def __init__(self, *, function: str, dataplane_uri: str, timeout_s: float) -> None:
        self._name = function
        self._function = load_reward_function(function)
        self._reader = Reader(dataplane_uri, timeout_s=timeout_s)

    def score(self, tasks: list[RewardTask]) -> list[GroupRewards]:
        """Rewards of the groups, in order. A response on which the function raises scores 0 and is counted."""
        views = self._reader.resolve([task.group.ref for task in tasks])
        return [self._score_group(task, record.decode(view)) for task, view in zip(tasks, views)]

    def _score_group(self, task: RewardTask, group: record.GroupRecord) -> GroupRewards:
        rewards, num_errors = [], 0
        for sample in group.samples:
            try:
                reward = float(self._function(sample.text, task.answer, task.fields))
            except Exception as error:  # the function is the user's: nothing it does may end the run
                logger.warning("%s raised %r on the response %r; scored 0", self._name, error, sample.text[:200])
                reward, num_errors = 0.0, num_errors + 1
            rewards.append(reward if math.isfinite(reward) else 0.0)
        return GroupRewards(rewards=tuple(rewards), num_errors=num_errors)
