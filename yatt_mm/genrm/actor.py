"""The Ray side of a judge's engine. Importing this is light; torch and vllm load in the actor's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yatt_mm.common.cores import pin_to_cores
from yatt_mm.common.held_memory import StateReport, held_bytes
from yatt_mm.genrm.traffic import Traffic
from yatt_mm.protocol.genrm import JudgedGroup, JudgeSpec, JudgeTask
from yatt_mm.protocol.placement_model import State
from yatt_mm.protocol.rollout import EngineSpec
from yatt_mm.rollout.batch_barrier import BatchBarrier
from yatt_mm.rollout.starting_worker import StartingWorker

if TYPE_CHECKING:
    from yatt_mm.genrm.judge import Judge


class JudgeActor:
    """One engine of a reward model, which all controllers share.

    Consumes: lists of finished groups.  Produces: their scores.
    """

    def __init__(
        self,
        *,
        name: str,
        spec: JudgeSpec,
        engine: EngineSpec,
        dataplane_uri: str,
        num_controllers: int,
        deadline_s: float,
    ) -> None:
        """`name`: of this engine, in errors."""
        self._name = name
        self._spec = spec
        self._engine = engine
        self._dataplane_uri = dataplane_uri
        self._meeting: BatchBarrier[JudgeTask, JudgedGroup | None] = BatchBarrier(
            name, num_controllers=num_controllers, deadline_s=deadline_s
        )
        self._hosted: StartingWorker[Judge] = StartingWorker(name)
        self._traffic = Traffic()

    async def start(self) -> None:
        """Start the engine and put it to sleep. Unblocked by: the engine, its failure, or `shutdown`."""
        pin_to_cores(self._engine.cores)
        from yatt_mm.genrm.judge import Judge

        await self._hosted.start(Judge.start(self._name, self._spec, self._engine, self._dataplane_uri))
        await self._hosted.worker.engine.sleep()

    async def set_state(self, state: State) -> StateReport:
        """Sleep or be awake."""
        engine = self._hosted.worker.engine
        await (engine.wake_up() if state is State.AWAKE else engine.sleep())
        return StateReport(held_bytes=held_bytes())

    async def judge(self, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        """Judge the groups, together with whatever else the engine is doing.

        None stands for a group that the engine slept over, from the start or in the middle: it is to be judged again.
        """
        return await self._hosted.worker.judge(tasks)

    async def judge_together(self, phase: str, controller: int, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        """Judge the groups of all controllers as one batch, in the run's order of prompts; None as of `judge`.

        Raises:
            PhaseAbortedError: a controller did not send its tasks in time, or the batch failed.
        """
        judge = self._hosted.worker

        async def run(everyones: list[JudgeTask]) -> list[JudgedGroup | None]:
            return await judge.judge(everyones, as_batch=True)

        return await self._meeting.join(phase, controller, {task.group.slot: task for task in tasks}, run)

    async def metrics(self) -> dict[str, float]:
        """Media that the engine's process was sent since the start; traffic of this process since the last call."""
        return {
            "ipc_bytes": self._hosted.worker.engine.num_ipc_bytes,
            "moved_bytes": self._traffic.take_bytes(),
        }

    async def shutdown(self) -> None:
        """End the engine and every process that it started, also in the middle of its start."""
        from yatt_mm.genrm.judge import Judge

        await self._hosted.end(Judge.shutdown)
