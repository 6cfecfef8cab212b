"""The Ray actor of a remote judge. It has no engine and no device, but the same methods as `JudgeActor`.

The work is in `yatt_mm.genrm.remote`. Importing this module is light: aiohttp and the reader load in the actor's
process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yatt_mm.common.held_memory import StateReport
from yatt_mm.common.traffic import Traffic
from yatt_mm.protocol.genrm import JudgedGroup, JudgeSpec, JudgeTask, RemoteSpec
from yatt_mm.protocol.placement_model import State
from yatt_mm.rollout.batch_barrier import BatchBarrier

if TYPE_CHECKING:
    from yatt_mm.genrm.remote import RemoteJudge


class RemoteJudgeActor:
    """Sends groups to a judge's server; all controllers share it.

    Consumes: lists of finished groups.
    Produces: their verdicts.
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
        rendezvous: Any,
    ) -> None:
        """`name`: what errors call this actor.

        `deadline_s`: timeout of the data plane and for the other controllers' tasks. `rendezvous`: its actor, which
        gets the records of a server that is away or back.
        """
        self._spec = spec
        self._server = server
        self._dataplane_uri = dataplane_uri
        self._deadline_s = deadline_s
        self._rendezvous = rendezvous
        self._barrier: BatchBarrier[JudgeTask, JudgedGroup | None] = BatchBarrier(
            name, num_controllers=num_controllers, deadline_s=deadline_s
        )
        self._traffic = Traffic()
        self._judge: RemoteJudge | None = None

    async def start(self) -> None:
        """Connect to the data plane. The server gets no request before there is something to judge.

        Raises OSError if the file with the server's key cannot be read.
        """
        from dataplane.client.reader import Reader
        from yatt_mm.genrm.remote import RemoteJudge

        reader = Reader(self._dataplane_uri, timeout_s=self._deadline_s)
        self._judge = RemoteJudge(self._spec, self._server, reader, self._traffic, tell=self._put_record)

    async def set_state(self, state: State) -> StateReport:
        """Stop asking the server unless `state` is awake: groups under way are cut off.

        There is no device to give back.
        """
        if state is not State.AWAKE and self._judge is not None:
            self._judge.cut_off()
        return StateReport(held_bytes=0)

    async def judge(self, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        """Return verdicts on the groups, in order. None: the group was cut off; send it again.

        Raises RewardError if the server refuses every request.
        """
        assert self._judge is not None, "call start first"
        return await self._judge.judge(tasks)

    async def judge_together(self, phase: str, controller: int, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        """Return verdicts like `judge`, once all controllers have sent their tasks.

        A batch that is sent again may get other verdicts, because a server does not promise to compute the same numbers
        twice.

        Waits for: the tasks of all other controllers, then the batch.

        Raises:
            PhaseAbortedError: a controller did not send its tasks in time, or the batch failed.
        """
        return await self._barrier.join(phase, controller, {task.group.slot: task for task in tasks}, self.judge)

    async def settle(self) -> None:
        """Cut off all groups that are under way."""
        await self.set_state(State.ASLEEP)

    async def metrics(self) -> dict[str, float]:
        """Return `moved_bytes`: what this process moved over TCP since the last call, media included."""
        return {"ipc_bytes": 0, "moved_bytes": self._traffic.take_bytes()}

    async def shutdown(self) -> None:
        """Close the connections to the server and to the data plane."""
        if self._judge is not None:
            await self._judge.shutdown()

    def _put_record(self, record: dict[str, Any]) -> None:
        self._rendezvous.put_record.remote(record)
