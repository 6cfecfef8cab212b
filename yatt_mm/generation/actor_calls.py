"""The calls of one controller to other actors: its ranks and engines, the rendezvous, the coordinator. Always with a
deadline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yatt_mm.batching.rendezvous import MeetingKey
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.control import Team


class ActorCalls:
    """Calls the other actors for one controller, always with a deadline."""

    def __init__(self, index: int, config: Config, team: Team) -> None:
        self.step = 0
        """The step of the run, for errors and meetings."""
        self.phase = "start"
        """The part of the step that the controller is in, for errors and meetings."""
        self._index = index
        self._team = team
        self._deadline_s = config.controllers.deadline_s
        self._sequence = 0
        num = config.controllers.num
        self.my_engines = range(index, len(team.engines), num)
        """This controller's engines of the policy; engines are divided among the controllers."""
        self.my_replicas = range(index, team.num_replicas, num)
        """This controller's data-parallel replicas, divided in the same way."""
        judges = [(name, e) for name, engines in team.judges.items() for e in range(len(engines))]
        self._my_judges = judges[index::num]

    def on_my_ranks(self, method: str, *arguments: object) -> list[Any]:
        """Return what all ranks of my replicas return."""
        calls = [
            (name, getattr(rank, method).remote(*arguments))
            for replica in self.my_replicas
            for name, rank in self._team.ranks_of(replica)
        ]
        return self.wait(calls, method)

    def on_engines(self, engines: Sequence[int], method: str, *arguments: object) -> list[Any]:
        """Return what engines of the policy return."""
        calls = [
            (self._team.engine_name(e), getattr(self._team.engines[e], method).remote(*arguments)) for e in engines
        ]
        return self.wait(calls, " ".join([method, *map(str, arguments)]))

    def on_my_judges(self, method: str, *arguments: object) -> list[Any]:
        """Return what my share of the judges' engines returns."""
        calls = [
            (self._team.judge_name(judge, e), getattr(self._team.judges[judge][e], method).remote(*arguments))
            for judge, e in self._my_judges
        ]
        return self.wait(calls, " ".join([method, *map(str, arguments)]))

    def wait(self, calls: list[tuple[str, Any]], what: str) -> list[Any]:
        """Return what the calls return, given as `(worker's name, call)` pairs."""
        return wait_all(calls, what=f"{what} of step {self.step}", deadline_s=self._deadline_s)

    def meet(self, value: Any) -> list[Any]:
        """Return [C] the values that all controllers brought to this meeting."""
        return self.meet_for("gather", value)

    def meet_for(self, method: str, *values: Any) -> Any:
        """Call a meeting method of the rendezvous and return its result, which all controllers get."""
        key = MeetingKey(
            step=self.step, phase=self.phase, restart_count=self._team.restart_count, sequence=self._sequence
        )
        self._sequence += 1
        return self.ask(method, key, self._index, *values)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rendezvous and return its result."""
        return self._ask("the rendezvous", self._team.rendezvous, method, *arguments)

    def ask_coordinator(self, method: str, *arguments: Any) -> Any:
        """Call a method of the coordinator and return its result."""
        return self._ask("the coordinator", self._team.coordinator, method, *arguments)

    def _ask(self, name: str, actor: Any, method: str, *arguments: Any) -> Any:
        call = getattr(actor, method).remote(*arguments)
        deadline_s = self._deadline_s * 1.5  # the coordinator's own deadlines end earlier and say more
        return wait_all([(name, call)], what=method, deadline_s=deadline_s)[0]
