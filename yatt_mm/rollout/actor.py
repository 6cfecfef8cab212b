"""The Ray actor of one rollout engine: start, sleep, sample, take weights, shut down.

The work is in `yatt_mm.rollout.worker`. Importing this module loads neither torch nor vllm; they load in the actor's
process.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from yatt_mm.common.cores import pin_to_cores
from yatt_mm.common.held_memory import StateReport, held_bytes
from yatt_mm.protocol.placement_model import State
from yatt_mm.protocol.published import Published
from yatt_mm.protocol.rollout import EngineSpec, GroupRef, PromptTask, SamplingSettings
from yatt_mm.rollout.batch_barrier import BatchBarrier
from yatt_mm.rollout.starting_worker import StartingWorker

if TYPE_CHECKING:
    from yatt_mm.rollout.worker import RolloutWorker


class RolloutActor:
    """One engine of the policy; all controllers send it prompts.

    Consumes: lists of prompt tasks.
    Produces: refs of sampled groups.
    """

    def __init__(
        self, *, index: int, spec: EngineSpec, dataplane_uri: str, num_controllers: int, deadline_s: float
    ) -> None:
        name = f"engine {index}"
        self._spec = spec
        self._dataplane_uri = dataplane_uri
        self._barrier: BatchBarrier[PromptTask, GroupRef] = BatchBarrier(
            name, num_controllers=num_controllers, deadline_s=deadline_s
        )
        self._hosted: StartingWorker[RolloutWorker] = StartingWorker(name)

    async def start(self) -> None:
        """Start the engine and put it to sleep.

        Waits for: the engine.  Unblocked by: the engine, its failure, or `shutdown`.
        """
        pin_to_cores(self._spec.cores)
        from yatt_mm.rollout.worker import RolloutWorker

        await self._hosted.start(RolloutWorker.start(self._spec, self._dataplane_uri))
        await self._hosted.worker.engine.sleep()

    async def set_state(self, state: State) -> StateReport:
        """Wake the engine up if `state` is awake, else put it to sleep; return the memory that it holds then."""
        worker = self._hosted.worker
        if state is State.AWAKE:
            await worker.engine.wake_up()
        else:
            await worker.engine.sleep()  # for weights_only: `update_weights` takes the memory of the weights later
        return StateReport(held_bytes=held_bytes())

    async def generate(self, tasks: list[PromptTask], sampling: SamplingSettings) -> list[GroupRef]:
        """Sample responses for all tasks at the same time, and return the refs of the stored groups, in order.

        The engine may compute other requests at the same time. Responses that `abort` or the engine's sleep cuts off
        keep the tokens that they have, and get finish reason "abort".
        """
        worker = self._hosted.worker
        return list(await asyncio.gather(*(worker.generate(task, sampling) for task in tasks)))

    async def abort(self, names: list[str]) -> None:
        """End the groups of the tasks with these names now; `generate` returns them. Unknown names are ignored."""
        await self._hosted.worker.abort(names)

    async def generate_together(
        self, phase: str, controller: int, tasks: list[PromptTask], sampling: SamplingSettings
    ) -> list[GroupRef]:
        """Return this controller's groups after sampling the tasks of all controllers as one batch.

        The batch has the run's order of prompts.

        Waits for: the tasks of all other controllers, then the batch.

        Raises:
            PhaseAbortedError: a controller did not send its tasks in time, or the batch failed.
        """
        worker = self._hosted.worker

        async def run(all_tasks: list[PromptTask]) -> list[GroupRef]:
            return await worker.generate_batch(all_tasks, sampling)

        return await self._barrier.join(phase, controller, {task.slot: task for task in tasks}, run)

    async def update_weights(self, published: Published) -> None:
        """Load the published weights, and empty every cache that depends on the old ones."""
        await self._hosted.worker.update_weights(published)

    async def settle(self) -> None:
        """End all groups that are under way, and sleep. Raises EngineError if the engine is of no use any more."""
        await self._hosted.worker.engine.settle()

    async def metrics(self) -> dict[str, float]:
        """Return the worker's totals since the start."""
        return self._hosted.worker.metrics()

    async def shutdown(self) -> None:
        """End the engine and every process that it started. Also works while the engine is starting."""
        from yatt_mm.rollout.worker import RolloutWorker

        await self._hosted.end(RolloutWorker.shutdown)
