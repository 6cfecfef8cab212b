"""The Ray side of a rollout worker. Importing this is light; torch and vllm load in the actor's process."""

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
    """One engine that all controllers share.

    Consumes: lists of prompt tasks.  Produces: refs of finished groups.
    """

    def __init__(
        self, *, index: int, spec: EngineSpec, dataplane_uri: str, num_controllers: int, deadline_s: float
    ) -> None:
        name = f"engine {index}"
        self._spec = spec
        self._dataplane_uri = dataplane_uri
        self._meeting: BatchBarrier[PromptTask, GroupRef] = BatchBarrier(
            name, num_controllers=num_controllers, deadline_s=deadline_s
        )
        self._hosted: StartingWorker[RolloutWorker] = StartingWorker(name)

    async def start(self) -> None:
        """Start the engine and put it to sleep. Unblocked by: the engine, its failure, or `shutdown`."""
        pin_to_cores(self._spec.cores)
        from yatt_mm.rollout.worker import RolloutWorker

        await self._hosted.start(RolloutWorker.start(self._spec, self._dataplane_uri))
        await self._hosted.worker.engine.sleep()

    async def set_state(self, state: State) -> StateReport:
        """Sleep, hold weights only, or be awake."""
        worker = self._hosted.worker
        if state is State.AWAKE:
            await worker.engine.wake_up()
        else:
            await worker.engine.sleep()  # `update_weights` wakes the weights alone
        return StateReport(held_bytes=held_bytes())

    async def generate(self, tasks: list[PromptTask], sampling: SamplingSettings) -> list[GroupRef]:
        """Answer the tasks, all at once, together with whatever else the engine is doing.

        What `abort` or the engine's sleep cuts off comes back with the tokens that it has, and finish reason "abort".
        """
        worker = self._hosted.worker
        return list(await asyncio.gather(*(worker.generate(task, sampling) for task in tasks)))

    async def abort(self, names: list[str]) -> None:
        """End the groups of the tasks with these names now; `generate` returns them. Others are ignored."""
        await self._hosted.worker.abort(names)

    async def generate_together(
        self, phase: str, controller: int, tasks: list[PromptTask], sampling: SamplingSettings
    ) -> list[GroupRef]:
        """Answer the tasks of all controllers as one batch, in the run's order of prompts.

        Raises:
            PhaseAbortedError: a controller did not send its tasks in time, or the batch failed.
        """
        worker = self._hosted.worker

        async def run(everyones: list[PromptTask]) -> list[GroupRef]:
            return await worker.generate_batch(everyones, sampling)

        return await self._meeting.join(phase, controller, {task.slot: task for task in tasks}, run)

    async def update_weights(self, published: Published) -> None:
        """Take the published weights; every cache that depends on the old ones is emptied."""
        await self._hosted.worker.update_weights(published)

    async def metrics(self) -> dict[str, float]:
        """Totals since the start."""
        return self._hosted.worker.metrics()

    async def shutdown(self) -> None:
        """End the engine and every process that it started, also in the middle of its start."""
        from yatt_mm.rollout.worker import RolloutWorker

        await self._hosted.end(RolloutWorker.shutdown)
