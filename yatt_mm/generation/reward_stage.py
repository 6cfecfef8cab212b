"""The second stage of a generation phase: reward workers apply the reward function to groups with responses."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter

import ray

from yatt_mm.common.errors import WorkerError
from yatt_mm.generation.group_work import GroupWork
from yatt_mm.generation.phase_context import CHUNK_SIZE, PhaseContext
from yatt_mm.generation.tick_batch import TickBatch
from yatt_mm.protocol.faults import FUNCTION, Failures
from yatt_mm.protocol.rewards import GroupRewards, RewardTask, Scores

MAX_ATTEMPTS = 3
"""The number of attempts at one call, if reward workers die."""
RETRY_S = 0.5
"""The time between two questions whether a reward worker is there again."""
BUSY_S = 1.0
"""A worker that does not say within this time, in seconds, that it is there, but is not lost either, is busy."""


class RewardStage:
    """Scores groups with the reward function, in reward workers."""

    def __init__(self, context: PhaseContext) -> None:
        self._context = context
        self._scored: TickBatch[None, RewardTask, GroupRewards] = TickBatch(
            context.calls, self._score, max_items=CHUNK_SIZE
        )
        num_workers, host_of = len(context.team.reward_workers), context.team.placement.host_of_number
        turn = [(context.controller + i) % num_workers for i in range(num_workers)]
        near = [worker for worker in turn if host_of(worker) == host_of(context.controller)]
        self._near = itertools.cycle(near or turn)
        """The workers on this controller's host, if there are some."""
        self._every = itertools.cycle([*turn[1:], turn[0]])
        """All workers, of which one is asked when another one has died."""
        self._busy: Counter[int] = Counter()
        """[reward worker] the number of its calls."""
        context.calls.on_late = self._restart_late

    async def score(self, work: GroupWork) -> None:
        """Give all responses of a group the scores of the reward function."""
        assert work.group is not None
        prompt = work.prompt
        task = RewardTask(
            group=work.group,
            function=prompt.reward,
            answer=prompt.answer,
            fields=prompt.fields,
            conversation=prompt.conversation,
            media=prompt.media,
            max_tokens=self._context.config.rollout.max_tokens,
        )
        got = await self._scored.add(None, task)
        work.rewards, work.failures = list(got.rewards), []
        scores = Scores(source=FUNCTION, values=got.rewards, parts=got.parts, answers=got.answers, votes=got.votes)
        work.scores = [scores]
        if got.fault is not None:
            work.failures.append(Failures(source=FUNCTION, num=got.num_errors, fault=got.fault))

    async def _score(self, _: None, tasks: list[RewardTask]) -> list[GroupRewards]:
        """Have the next worker score the groups, and if it dies, another one that is there. Ray restarts the one that
        died."""
        calls, workers = self._context.calls, self._context.team.reward_workers
        worker = next(self._near)
        for num_attempts in itertools.count(1):
            self._busy[worker] += 1
            try:
                what = f"the rewards of {self._context.name}"
                rewards: list[GroupRewards] = await calls.reply(
                    workers[worker].score.remote(tasks), name=f"reward worker {worker}", what=what
                )
                return rewards
            except WorkerError as error:
                if num_attempts == MAX_ATTEMPTS or not isinstance(error.__cause__, ray.exceptions.RayActorError):
                    raise
            finally:
                self._busy[worker] -= 1
            worker = await self._next_ready()
        raise AssertionError("the loop ends by itself only")

    async def _next_ready(self) -> int:
        """Wait until a worker is there, perhaps busy, and return its number. Raises WorkerError if all are lost for
        `controllers.deadline_s`."""
        calls, workers = self._context.calls, self._context.team.reward_workers
        deadline = time.monotonic() + self._context.config.controllers.deadline_s
        while True:
            worker = next(self._every)
            name, what = f"reward worker {worker}", "starting again"
            try:
                await calls.reply(workers[worker].ready.remote(), name=name, what=what, deadline_s=BUSY_S)
                return worker
            except WorkerError as error:
                if not isinstance(error.__cause__, ray.exceptions.RayActorError):
                    return worker
                if time.monotonic() + RETRY_S >= deadline:
                    raise
            await asyncio.sleep(RETRY_S)

    def _restart_late(self) -> bool:
        """Restart the workers that did not reply. Their calls fail, and are made again. Return False if no call is
        under way."""
        late = [worker for worker, num_calls in self._busy.items() if num_calls]
        for worker in late:
            ray.kill(self._context.team.reward_workers[worker], no_restart=False)
        return bool(late)
