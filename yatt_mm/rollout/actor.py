"""The Ray side of a rollout worker: states, and the meeting of controllers that a deterministic batch needs.

Importing this is light; torch and vllm load in the actor's process.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from yatt_mm.errors import PhaseAbortedError
from yatt_mm.placement import State
from yatt_mm.rollout.messages import EngineSpec, GroupRef, PromptTask, Sampling

if TYPE_CHECKING:
    from yatt_mm.rollout.worker import RolloutWorker


@dataclass(slots=True)
class _Batch:
    """Tasks of one phase, as they come in from the controllers."""

    tasks: dict[int, list[PromptTask]] = field(default_factory=dict)
    is_met: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all controllers have sent theirs."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    groups: dict[int, GroupRef] = field(default_factory=dict)
    error: str | None = None


class RolloutActor:
    """One engine that all controllers share.

    Consumes: lists of prompt tasks.  Produces: refs of finished groups.
    """

    def __init__(
        self, *, index: int, spec: EngineSpec, dataplane_uri: str, num_controllers: int, deadline_s: float
    ) -> None:
        self._index = index
        self._spec = spec
        self._dataplane_uri = dataplane_uri
        self._num_controllers = num_controllers
        self._deadline_s = deadline_s
        self._batches: dict[str, _Batch] = {}
        self._start: asyncio.Task[RolloutWorker] | None = None

    async def start(self) -> None:
        """Start the engine; it is awake afterwards. torch and vllm load here, not with this module.

        Unblocked by: the engine, its failure, or `shutdown`.
        """
        from yatt_mm.rollout.worker import RolloutWorker

        self._start = asyncio.create_task(RolloutWorker.start(self._spec, self._dataplane_uri))
        await self._start

    async def set_state(self, state: State) -> None:
        """Sleep, hold weights only, or be awake."""
        worker = self._started()
        if state is State.AWAKE:
            await worker.engine.wake_up()
        else:
            await worker.engine.sleep()  # `update_weights` wakes the weights alone

    async def generate(self, tasks: list[PromptTask], sampling: Sampling) -> list[GroupRef]:
        """Answer the tasks, all at once, together with whatever else the engine is doing."""
        worker = self._started()
        return list(await asyncio.gather(*(worker.generate(task, sampling) for task in tasks)))

    async def generate_together(
        self, phase: str, controller: int, tasks: list[PromptTask], sampling: Sampling
    ) -> list[GroupRef]:
        """Answer the tasks of all controllers as one batch, in the run's order of prompts.

        Waits for: the other controllers' tasks of the same phase, up to the deadline; then for the batch, which the
        engine ends by itself when it finishes nothing for as long.
        Raises:
            PhaseAbortedError: a controller did not send its tasks in time, or the batch failed.
        """
        batch = self._batches.setdefault(phase, _Batch())
        batch.tasks[controller] = tasks
        if len(batch.tasks) == self._num_controllers:
            del self._batches[phase]
            batch.is_met.set()
            await self._run(batch, sampling)
        try:
            await asyncio.wait_for(batch.is_met.wait(), self._deadline_s)
        except TimeoutError:
            missing = sorted(set(range(self._num_controllers)) - set(batch.tasks))
            raise PhaseAbortedError(
                f"engine {self._index} waited {self._deadline_s:g} s in {phase} for controller(s) {missing}"
            ) from None
        await batch.done.wait()
        if batch.error is not None:
            raise PhaseAbortedError(f"engine {self._index} failed in {phase}: {batch.error}")
        return [batch.groups[task.slot] for task in tasks]

    async def update_weights(self, path: str, version: int) -> None:
        """Take the published weights; every cache that depends on the old ones is emptied."""
        await self._started().update_weights(path, version)

    async def metrics(self) -> dict[str, float]:
        """Totals since the start."""
        return self._started().metrics()

    async def shutdown(self) -> None:
        """End the engine and every process that it started, also in the middle of its start."""
        if self._start is None:
            return
        self._start.cancel()
        await asyncio.wait([self._start])
        if not self._start.cancelled() and self._start.exception() is None:
            await self._start.result().shutdown()

    async def _run(self, batch: _Batch, sampling: Sampling) -> None:
        worker = self._started()
        tasks = sorted((task for part in batch.tasks.values() for task in part), key=lambda task: task.slot)
        try:
            if tasks:
                groups = await worker.generate_batch(tasks, sampling)
                batch.groups = {group.slot: group for group in groups}
        except Exception as error:  # the other controllers wait for this batch: they must hear of it
            batch.error = f"{type(error).__name__}: {error}"
            raise
        except asyncio.CancelledError:
            batch.error = "the call that ran the batch was cancelled"
            raise
        finally:
            batch.done.set()

    def _started(self) -> RolloutWorker:
        if self._start is None or not self._start.done():
            raise RuntimeError(f"engine {self._index} has not been started")
        return self._start.result()
