"""The calls of one controller to its share of the workers: training ranks, engines, judges. Always with a deadline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.common.progress import Done
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.control import Team


class WorkerCalls:
    """Calls workers for one controller, always with a deadline."""

    def __init__(self, index: int, config: Config, team: Team, rendezvous: RendezvousClient, *, step: int) -> None:
        self.step = step
        """The step of the run, for errors."""
        self._team = team
        self._rendezvous = rendezvous
        self._last_done: list[Done | None] = []
        self._deadline_s = config.controllers.deadline_s
        num = config.controllers.num
        self.my_engines = range(index, len(team.engines), num)
        """This controller's engines of the policy; engines are divided among the controllers."""
        self.my_replicas = range(index, team.num_replicas, num)
        """This controller's data-parallel replicas, divided in the same way."""
        judges = [(name, e) for name, engines in team.judges.items() for e in range(len(engines))]
        self._my_judges = judges[index::num]

    def on_my_ranks(self, method: str, *arguments: object, at_most_s: float = math.inf) -> list[Any]:
        """Call `method` on all ranks of this controller's replicas, and return their results in order. `at_most_s`: see
        `wait`."""
        calls = [
            (name, getattr(rank, method).remote(*arguments))
            for replica in self.my_replicas
            for name, rank in self._team.ranks_of(replica)
        ]
        return self.wait(calls, method, at_most_s=at_most_s)

    def on_engines(self, engines: Sequence[int], method: str, *arguments: object) -> list[Any]:
        """Call `method` on these engines of the policy, and return their results in order."""
        calls = [
            (self._team.engine_name(e), getattr(self._team.engines[e], method).remote(*arguments)) for e in engines
        ]
        return self.wait(calls, " ".join([method, *map(str, arguments)]))

    def on_my_judges(self, method: str, *arguments: object) -> list[Any]:
        """Call `method` on this controller's share of the judges' engines, and return their results in order."""
        calls = [
            (self._team.judge_name(judge, e), getattr(self._team.judges[judge][e], method).remote(*arguments))
            for judge, e in self._my_judges
        ]
        return self.wait(calls, " ".join([method, *map(str, arguments)]))

    def wait(self, calls: list[tuple[str, Any]], what: str, *, at_most_s: float = math.inf) -> list[Any]:
        """Return what the calls return, given as `(worker's name, call)` pairs. `at_most_s`: their deadline; without
        it only workers that finish nothing are too late."""
        names = [name for name, _ in calls]
        return wait_all(
            calls,
            what=f"{what} of step {self.step}",
            deadline_s=self._deadline_s,
            at_most_s=at_most_s,
            done_by=lambda: self._done_by(names),
        )

    def _done_by(self, names: Sequence[str]) -> list[Done | None]:
        """Return what workers have done so far, and give a sign of life: while they are at work, so is this
        controller."""
        found = self._team.progress.of(names)
        if found != self._last_done:
            self._last_done = found
            self._rendezvous.seen()
        return found
