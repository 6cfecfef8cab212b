"""How units are told to change their state: each by a call of its own, or those of a host by one call to its agent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yatt_mm.common.held_memory import StateReport
from yatt_mm.common.ray_calls import own_words, reply_of, wait_all
from yatt_mm.protocol.placement_model import Placement, State, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """What a unit says after it has changed its state."""

    report: StateReport
    seconds: float
    """How long it took."""


class StateChanges:
    """Tells the units of a run to change their states."""

    def __init__(
        self, placement: Placement, workers: Mapping[Unit, Any], *, agents: Sequence[Any], deadline_s: float
    ) -> None:
        """`workers`: the actor of each unit. `agents`: [host] its agent, which has the actors of the host's units;
        empty in a run on one host. `deadline_s`: timeout of one change."""
        self._placement = placement
        self._workers = dict(workers)
        self._agents = tuple(agents)
        self._deadline_s = deadline_s

    def groups(self, states: Mapping[Unit, State]) -> list[tuple[Sequence[Unit], State]]:
        """Return the units that are told together, with the state that they get."""
        if not self._agents:
            return [((unit,), state) for unit, state in states.items()]
        groups: dict[tuple[int, State], list[Unit]] = {}
        for unit, state in states.items():
            groups.setdefault((self._placement.host_of(unit), state), []).append(unit)
        return [(units, state) for (_, state), units in groups.items()]

    async def change(self, units: Sequence[Unit], state: State) -> list[StateChange]:
        """Change the state of one of `groups`, and return what each unit says.

        Raises:
            WorkerError: a unit failed, or did not reply in time.
        """
        began_s, names, what = time.monotonic(), [str(unit) for unit in units], becoming(state)
        if self._agents:
            agent = self._agents[self._placement.host_of(units[0])]
            call = agent.set_state.remote(names, state, self._deadline_s)
            with own_words():
                # the agent's deadline comes first, and its error names the unit
                return await reply_of(call, name="the agent of a host", what=what, deadline_s=1.5 * self._deadline_s)
        call = self._workers[units[0]].set_state.remote(state)
        report = await reply_of(call, name=names[0], what=what, deadline_s=self._deadline_s)
        return [StateChange(report=report, seconds=time.monotonic() - began_s)]


def by_host(placement: Placement, workers: Mapping[Unit, Any]) -> list[dict[str, Any]]:
    """Return [host] the actors of its units, by the names of the units."""
    hosts: list[dict[str, Any]] = [{} for _ in range(placement.num_hosts)]
    for unit, worker in workers.items():
        hosts[placement.host_of(unit)][str(unit)] = worker
    return hosts


def change_on_host(workers: Mapping[str, Any], state: State, *, deadline_s: float) -> list[StateChange]:
    """Change the state of units of one host, and return what each of them says. `workers`: by the names of the units.

    Raises:
        WorkerError: a unit failed, or did not reply in time.
    """
    began_s, seconds = time.monotonic(), dict[str, float]()
    calls = [(name, worker.set_state.remote(state)) for name, worker in workers.items()]

    def note(name: str) -> None:
        seconds[name] = time.monotonic() - began_s

    reports = wait_all(calls, what=becoming(state), deadline_s=deadline_s, on_done=note)
    return [StateChange(report=report, seconds=seconds[name]) for name, report in zip(workers, reports, strict=True)]


def becoming(state: State) -> str:
    """Return what errors say a unit was doing."""
    return f"becoming {state}"
