"""The Ray side of a remote judge: no engine and no device, the same verbs. Importing this is light."""

from __future__ import annotations

from typing import TYPE_CHECKING

from yatt_mm.common.held_memory import StateReport
from yatt_mm.genrm.traffic import Traffic
from yatt_mm.protocol.genrm import JudgedGroup, JudgeSpec, JudgeTask, RemoteSpec
from yatt_mm.protocol.placement_model import State
from yatt_mm.rollout.batch_barrier import BatchBarrier

if TYPE_CHECKING:
    from yatt_mm.genrm.remote import RemoteJudge


class RemoteJudgeActor:
    """Sends what is to be judged to a server.

    Consumes: lists of finished groups.  Produces: their scores.
    """

    def __init__(
        self,
        *,
        name: str,
        spec: JudgeSpec,
        server: RemoteSpec,
        dataplane_uri: str,
        num_controllers: int,
        deadline_s: float,
    ) -> None:
        """`name`: of this actor, in errors."""
        self._spec = spec
        self._server = server
        self._dataplane_uri = dataplane_uri
        self._deadline_s = deadline_s
        self._meeting: BatchBarrier[JudgeTask, JudgedGroup | None] = BatchBarrier(
            name, num_controllers=num_controllers, deadline_s=deadline_s
        )
        self._traffic = Traffic()
        self._judge: RemoteJudge | None = None

    async def start(self) -> None:
        """Connect to the data plane; the server is only spoken to when there is something to judge."""
        from dataplane.client.reader import Reader
        from yatt_mm.genrm.remote import RemoteJudge

        reader = Reader(self._dataplane_uri, timeout_s=self._deadline_s)
        self._judge = RemoteJudge(self._spec, self._server, reader, self._traffic)

    async def set_state(self, state: State) -> StateReport:
        """It holds no device; but while others train it asks nothing, and what it had begun comes to nothing."""
        if state is not State.AWAKE and self._judge is not None:
            self._judge.cut_off()
        return StateReport(held_bytes=0)

    async def judge(self, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        """Judge the groups; None stands for one that was cut off: it is to be judged again."""
        assert self._judge is not None, "start comes first"
        return await self._judge.judge(tasks)

    async def judge_together(self, phase: str, controller: int, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        """As `judge`, when all controllers have come; a server does not promise the same numbers again.

        Raises:
            PhaseAbortedError: a controller did not send its tasks in time, or the batch failed.
        """
        return await self._meeting.join(phase, controller, {task.group.slot: task for task in tasks}, self.judge)

    async def metrics(self) -> dict[str, float]:
        """Traffic of this process since the last call, media included."""
        return {"ipc_bytes": 0, "moved_bytes": self._traffic.take_bytes()}

    async def shutdown(self) -> None:
        """Close the connections."""
        if self._judge is not None:
            await self._judge.shutdown()
