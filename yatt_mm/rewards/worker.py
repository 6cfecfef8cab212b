"""The body of a reward worker: it resolves finished groups and calls the reward function on their texts."""

from __future__ import annotations

import logging

from dataplane.client.reader import Reader
from yatt_mm.protocol import group_record
from yatt_mm.protocol.faults import Fault
from yatt_mm.protocol.rewards import GroupRewards, RewardTask
from yatt_mm.rewards.call import RewardCall
from yatt_mm.rewards.loading import load_reward_function

logger = logging.getLogger(__name__)


class RewardWorker:
    """A worker that scores groups with the run's reward functions. It handles one call at a time, for any number of
    groups."""

    def __init__(self, *, functions: tuple[str, ...], dataplane_uri: str, timeout_s: float, deadline_s: float) -> None:
        """`functions`: their paths. `timeout_s` is for calls to the data plane, `deadline_s` for a function, per
        response."""
        self._calls = {
            path: RewardCall(load_reward_function(path), name=path, deadline_s=deadline_s) for path in functions
        }
        self._reader = Reader(dataplane_uri, timeout_s=timeout_s)

    def score(self, tasks: list[RewardTask]) -> list[GroupRewards]:
        """Return the rewards of the groups, in order.

        A response scores 0 and is counted if the function raises, takes longer than the deadline, or gives no finite
        number.
        """
        views = self._reader.resolve([task.group.ref for task in tasks])
        return [self._score_group(task, group_record.decode(view)) for task, view in zip(tasks, views)]

    def _score_group(self, task: RewardTask, group: group_record.GroupRecord) -> GroupRewards:
        call = self._calls[task.function]
        scored = [call(sample.text, task.answer, task.fields) for sample in group.samples]
        faults = [fault for fault in scored if isinstance(fault, Fault)]
        for fault in faults:
            logger.warning("%s on the response %r: %s; scored 0", call.name, fault.response, fault.what)
        return GroupRewards(
            rewards=tuple(0.0 if isinstance(reward, Fault) else reward for reward in scored),
            num_errors=len(faults),
            fault=faults[0] if faults else None,
        )
