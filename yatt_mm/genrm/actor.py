"""The Ray actor of one judge engine: start, sleep, judge, shut down.

The work is in `yatt_mm.genrm.judge`. Importing this module loads neither torch nor vllm; they load in the actor's
process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from yatt_mm.common.cores import pin_to_cores
from yatt_mm.common.held_memory import StateReport, held_bytes
from yatt_mm.common.traffic import Traffic
from yatt_mm.protocol.genrm import JudgedGroup, JudgeSpec, JudgeTask
from yatt_mm.protocol.placement_model import State
from yatt_mm.protocol.rollout import EngineSpec
from yatt_mm.rollout.batch_barrier import BatchBarrier
from yatt_mm.rollout.starting_worker import StartingWorker

if TYPE_CHECKING:
    from yatt_mm.genrm.judge import Judge


class JudgeActor:
    """One engine of a judge; all controllers send it groups.

    Consumes: lists of finished groups.
    Produces: their verdicts.
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
        """`name`: what errors call this engine.

        `deadline_s`: timeout for the other controllers' tasks in `judge_together`.
        """
        self._name = name
        self._spec = spec
        self._engine = engine
        self._dataplane_uri = dataplane_uri
        self._barrier: BatchBarrier[JudgeTask, JudgedGroup | None] = BatchBarrier(
            name, num_controllers=num_controllers, deadline_s=deadline_s
        )
        self._hosted: StartingWorker[Judge] = StartingWorker(name)
        self._traffic = Traffic()

    async def start(self) -> None:
        """Start the engine and put it to sleep.

        Waits for: the engine.  Unblocked by: the engine, its failure, or `shutdown`.
        """
        pin_to_cores(self._engine.cores)
        from yatt_mm.genrm.judge import Judge

        await self._hosted.start(Judge.start(self._name, self._spec, self._engine, self._dataplane_uri))
        await self._hosted.worker.engine.sleep()

    async def set_state(self, state: State) -> StateReport:
        """Wake the engine up if `state` is awake, else put it to sleep; return the memory that it holds then."""
        engine = self._hosted.worker.engine
        await (engine.wake_up() if state is State.AWAKE else engine.sleep())
        return StateReport(held_bytes=held_bytes())

    async def judge(self, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        """Return verdicts on the groups, in order. The engine may compute other requests at the same time.

        None: the engine was asleep or fell asleep before the group was judged; send the group again.
        """
        return await self._hosted.worker.judge(tasks)

    async def judge_together(self, phase: str, controller: int, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        """Return verdicts on this controller's groups after judging the groups of all controllers as one batch.

        The batch has the run's order of prompts. None: see `judge`.

        Waits for: the tasks of all other controllers, then the batch.

        Raises:
            PhaseAbortedError: a controller did not send its tasks in time, or the batch failed.
        """
        judge = self._hosted.worker

        async def run(all_tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
            return await judge.judge(all_tasks, as_batch=True)

        return await self._barrier.join(phase, controller, {task.group.slot: task for task in tasks}, run)

    async def settle(self) -> None:
        """End all groups that are under way, and sleep. Raises EngineError if the engine is of no use any more."""
        await self._hosted.worker.engine.settle()

    async def metrics(self) -> dict[str, float]:
        """Return the traffic in bytes.

        `ipc_bytes`: media sent to the engine's process since the start. `moved_bytes`: moved over TCP by this process
        since the last call.
        """
        return {
            "ipc_bytes": self._hosted.worker.engine.num_ipc_bytes,
            "moved_bytes": self._traffic.take_bytes(),
        }

    async def shutdown(self) -> None:
        """End the engine and every process that it started. Also works while the engine is starting."""
        from yatt_mm.genrm.judge import Judge

        await self._hosted.end(Judge.shutdown)
