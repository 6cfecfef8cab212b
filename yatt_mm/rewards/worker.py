"""The body of a reward worker: it resolves finished groups and calls the reward functions on their responses."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from yatt_mm.protocol import group_record
from yatt_mm.protocol.faults import Fault
from yatt_mm.protocol.rewards import GroupRewards, RewardTask
from yatt_mm.rewards.answers import final_answer
from yatt_mm.rewards.call import RewardCall
from yatt_mm.rewards.loading import load_reward_function
from yatt_mm.rewards.medium import Medium
from yatt_mm.rewards.reading import Reward
from yatt_mm.rewards.response import Response

logger = logging.getLogger(__name__)


class RewardWorker:
    """A worker that scores groups with the run's reward functions. It handles one call at a time, for any number of
    groups."""

    def __init__(
        self,
        *,
        functions: tuple[str, ...],
        weights: Mapping[str, float],
        ranges: Mapping[str, tuple[float, float]],
        dataplane_uri: str,
        timeout_s: float,
        deadline_s: float,
        longest_s: float,
    ) -> None:
        """`functions`: their paths. `weights`, `ranges`: those of the named parts of rewards. `timeout_s` is for calls
        to the data plane, `deadline_s` for a function, per response, and `longest_s` for all responses of a call to an
        async function or one that takes batches."""
        self._calls = {
            path: RewardCall(
                load_reward_function(path),
                name=path,
                deadline_s=deadline_s,
                longest_s=longest_s,
                weights=weights,
                ranges=ranges,
            )
            for path in functions
        }
        self._client = Client(dataplane_uri, timeout_s=timeout_s)
        self._reader = Reader(dataplane_uri, timeout_s=timeout_s)

    def score(self, tasks: list[RewardTask]) -> list[GroupRewards]:
        """Return the rewards of the groups, in order.

        A response scores 0 and is counted if the function raises, takes longer than the deadline, or gives no finite
        number.
        """
        views = self._reader.resolve([task.group.ref for task in tasks])
        groups = [self._responses(task, group_record.decode(view)) for task, view in zip(tasks, views)]
        return self._score(tasks, groups)

    def _score(self, tasks: Sequence[RewardTask], groups: Sequence[Sequence[Response]]) -> list[GroupRewards]:
        scored: dict[int, list[Reward | Fault]] = {}
        for path, call in self._calls.items():
            places = [place for place, task in enumerate(tasks) if task.function == path]
            given = iter(call([response for place in places for response in groups[place]]))
            scored |= {place: [next(given) for _ in groups[place]] for place in places}
        return [_together(task, groups[place], scored[place]) for place, task in enumerate(tasks)]

    def _responses(self, task: RewardTask, group: group_record.GroupRecord) -> list[Response]:
        texts = tuple(sample.text for sample in group.samples)
        conversation = task.conversation.messages()
        media = [Medium(ref, self._client, self._reader) for ref in task.media]
        return [
            Response(
                text=sample.text,
                answer=task.answer,
                fields=task.fields,
                conversation=conversation,
                group=texts,
                media=media,
                num_tokens=len(sample.token_ids),
                max_tokens=task.max_tokens,
            )
            for sample in group.samples
        ]


def _together(task: RewardTask, responses: Sequence[Response], scored: Sequence[Reward | Fault]) -> GroupRewards:
    """Return the rewards of one group."""
    faults = [one for one in scored if isinstance(one, Fault)]
    rewards = [Reward(value=0.0) if isinstance(one, Fault) else one for one in scored]
    for fault in faults:
        logger.warning("%s on the response %r: %s; scored 0", task.function, fault.response, fault.what)
    names = dict.fromkeys(name for reward in rewards for name in reward.parts)
    return GroupRewards(
        rewards=tuple(reward.value for reward in rewards),
        num_errors=len(faults),
        fault=faults[0] if faults else None,
        parts={name: tuple(reward.parts.get(name) for reward in rewards) for name in names},
        answers=tuple(reward.answer for reward in rewards),
        votes=tuple(map(_vote, responses, rewards)),
    )


def _vote(response: Response, reward: Reward) -> str:
    """Return what a response answers. A digest stands for its text, which controllers do not hold."""
    if reward.answer is not None:
        return reward.answer
    text = final_answer(response.text) or response.text.strip()
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
