"""The second stage of a generation phase: reward workers apply the reward function to groups with responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ray

from yatt_mm.common.errors import WorkerError
from yatt_mm.generation.group_work import GroupWork, PhaseContext
from yatt_mm.protocol.rewards import GroupRewards, RewardTask

MAX_ATTEMPTS = 3
"""The number of attempts at one call, if reward workers die."""


class RewardStage:
    """Sends groups to reward workers.

    Consumes: groups with all responses. Produces: the same groups with the function's rewards.
    """

    def __init__(self, context: PhaseContext, on_scored: Callable[[list[GroupWork]], None]) -> None:
        self._context = context
        self._on_scored = on_scored
        self._next_worker = context.controller
        self._busy: dict[int, int] = {}
        """[reward worker] the number of its calls."""

    def add(self, works: Sequence[GroupWork], *, num_attempts: int = 1) -> None:
        """Send groups to a reward worker, in one call."""
        context, workers = self._context, self._context.team.reward_workers
        worker = self._next_worker % len(workers)
        self._next_worker += 1
        self._busy[worker] = self._busy.get(worker, 0) + 1

        def take(rewards: list[GroupRewards]) -> None:
            self._busy[worker] -= 1
            for work, got in zip(works, rewards, strict=True):
                work.rewards, work.num_errors = list(got.rewards), got.num_errors
            self._on_scored(list(works))

        def ask_again(error: WorkerError) -> bool:
            """Give the groups to a worker again, and return True, if the worker died: Ray restarts it. For any other
            error return False."""
            self._busy[worker] -= 1
            if not isinstance(error.__cause__, ray.exceptions.RayActorError) or num_attempts == MAX_ATTEMPTS:
                return False
            self.add(works, num_attempts=num_attempts + 1)
            return True

        context.pending.then(
            workers[worker].score.remote([_task(work) for work in works]),
            take,
            name=f"reward worker {worker}",
            what=f"the rewards of {context.name}",
            handle_loss=ask_again,
        )

    def restart_late(self) -> bool:
        """End workers that do not reply. Their calls fail, and are asked again. Return False when there are none."""
        late = [worker for worker, num_calls in self._busy.items() if num_calls]
        for worker in late:
            ray.kill(self._context.team.reward_workers[worker], no_restart=False)
        return bool(late)


def _task(work: GroupWork) -> RewardTask:
    assert work.group is not None
    return RewardTask(group=work.group, answer=work.prompt.answer, fields=work.prompt.fields)
