"""The hosts of a run, as its launcher sees them: its own, and the others through their agents."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from dataplane.core.errors import NodeUnavailableError
from yatt_mm.common.errors import RunLost, UnreachableError, WorkerError
from yatt_mm.common.host_progress import HostProgress
from yatt_mm.common.progress import signal_part
from yatt_mm.common.ray_calls import fetch, wait_all
from yatt_mm.hosts.devices import Devices, RayNode
from yatt_mm.hosts.orders import NodeNews
from yatt_mm.placement.state_changes import by_host
from yatt_mm.protocol.placement_model import Placement, Unit

NEWS_S = 1.0
"""The seconds between two questions for news of another host."""
AGAIN_S = 0.5
"""The seconds after which a host is asked again, if the connection to it broke."""
REPLY_S = 60.0
"""The seconds in which the agent of a host must take over the units there."""
SIGNAL_S = 5.0
"""The seconds in which other hosts must send a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHost:
    """A host of a run."""

    node: RayNode
    node_id: str
    """The id of its data-plane node; empty if the user started that."""
    uri: str
    """The address of that node."""
    interface: str
    """The name of its network device to the other hosts; empty in a run on one host."""
    agent: Any
    """The handle of its agent; None in a run on one host."""

    def placed(self) -> dict[str, Any]:
        """Return options that put an actor on this host."""
        return self.node.placed()


class RunHosts:
    """The hosts of one run."""

    def __init__(self, own: RunHost, with_devices: Sequence[RunHost], devices: Devices, *, scratch: Path) -> None:
        """`scratch`: the folder for the run's temporary files, which has the same path on every host."""
        self.devices = devices
        self.own = own
        """The launcher's."""
        self.with_devices = tuple(with_devices)
        """[host] in the order of their devices."""
        self._scratch = scratch
        self._asked: dict[Any, tuple[RunHost, float]] = {}
        """[call for news] whom it asked, and when it may be asked again."""
        self._news: dict[str, NodeNews] = {}

    def of(self, number: int) -> RunHost:
        """Return the host of the controller or the reward worker with this number: they are divided over the hosts."""
        return self.with_devices[number % len(self.with_devices)]

    def with_these(self, devices: Sequence[int]) -> RunHost:
        """Return the host that has these devices."""
        return self.with_devices[self.devices.host_of(devices)]

    def give_units(self, placement: Placement, workers: Mapping[Unit, Any]) -> list[Any]:
        """Give the agents of the hosts the actors of their units. Return the agents, host by host; none in a run on
        one host.

        Raises:
            WorkerError: an agent did not reply in time.
        """
        with_devices = [host for host in self.with_devices if host.agent is not None]
        calls = [
            (f"the agent of host {host.node}", host.agent.take_units.remote(units))
            for host, units in zip(with_devices, by_host(placement, workers))
        ]
        wait_all(calls, what="taking its units", deadline_s=REPLY_S)
        return [host.agent for host in with_devices]

    @property
    def every(self) -> list[RunHost]:
        """All hosts, each once."""
        return list(dict.fromkeys((self.own, *self.with_devices)))

    @property
    def others(self) -> list[RunHost]:
        """All hosts but the launcher's."""
        return [host for host in self.with_devices if host.node.id != self.own.node.id]

    def progress(self, placement: Placement) -> HostProgress:
        """Return what reads the progress of the parts of the run."""
        numbers = {host.node.id: number for number, host in enumerate(self.every)}
        return HostProgress(
            agents=tuple(host.agent for host in self._with_agents),
            hosts={str(unit): numbers[self.with_devices[placement.host_of(unit)].node.id] for unit in placement.units},
        )

    @property
    def _with_agents(self) -> list[RunHost]:
        """All hosts of a run over several hosts; none in a run on one host."""
        return [host for host in self.every if host.agent is not None]

    @property
    def nodes(self) -> dict[str, str]:
        """[node id] The addresses of the data-plane nodes of a run over several hosts."""
        hosts = self.every
        return {host.node_id: host.uri for host in hosts} if len(hosts) > 1 else {}

    @property
    def num_restarts(self) -> int:
        """How many times nodes of other hosts were started again, as far as it is known."""
        return sum(news.num_restarts for news in self._news.values())

    @property
    def last_restart_s(self) -> float:
        """The seconds of the longest last restart of a node of another host."""
        return max((news.last_restart_s for news in self._news.values()), default=0.0)

    def check(self) -> None:
        """Take news of the hosts.

        Raises:
            RunLost: one of them is gone.
            NodeUnavailableError: its node died too often to be started again.
        """
        now_s = time.monotonic()
        asked = {host.node.id for host, _ in self._asked.values()}
        for host in self._with_agents:
            if host.node.id not in asked:
                self._asked[host.agent.news.remote()] = host, now_s + NEWS_S
        if not self._asked:
            return
        done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for call in done:
            host, again_s = self._asked[call]
            self._take(host, call)
            if now_s >= again_s:
                del self._asked[call]

    def require(self, *, deadline_s: float) -> None:
        """Return if all hosts reply in time. Raises as `check`."""
        end_s, silent = time.monotonic() + deadline_s, self._with_agents
        while silent:
            calls = {host.agent.news.remote(): host for host in silent}
            left_s = max(0.0, end_s - time.monotonic())
            done, late = ray.wait(list(calls), num_returns=len(calls), timeout=left_s)
            silent = [calls[call] for call in late] + [calls[one] for one in done if not self._take(calls[one], one)]
            if silent and time.monotonic() > end_s - AGAIN_S:
                raise RunLost(f"host {silent[0].node} is lost: its agent did not reply in {deadline_s:g} s")
            if silent:
                time.sleep(AGAIN_S)

    def _take(self, host: RunHost, call: Any) -> bool:
        """Take the news of a host. Return False if the connection to it broke."""
        try:
            news: NodeNews = fetch(call, name="its agent", what="the run")
        except UnreachableError:
            return False
        except WorkerError as error:
            raise RunLost(f"host {host.node} is lost: {error}") from error
        self._news[host.node.id] = news
        if news.failure:
            raise NodeUnavailableError(f"host {host.node}: {news.failure}")
        return True

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process of a part of the run, on whichever host it is."""
        signal_part(name, number, self._scratch)
        calls = [host.agent.signal.remote(name, int(number)) for host in self.others]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=SIGNAL_S)
