"""The metrics of what the hosts of a run send to each other, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from dataplane.core.errors import NodeUnavailableError
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.control.run_client import RunClient
from yatt_mm.control.worker_calls import WorkerCalls
from yatt_mm.protocol.control import Team
from yatt_mm.protocol.step_meter import StepMeter

REPLY_S = 60.0
"""The seconds in which hosts must say what they sent."""
OF_RANKS = ("gradients", "weights")
FETCHED = ("fetched_bytes", "fetched_plain_bytes")
"""The values of the nodes' `stat` that count what they fetched from each other."""


class HostBytes:
    """One controller's part of these metrics. A run on one host has none."""

    def __init__(self, team: Team, client: RunClient, workers: WorkerCalls) -> None:
        self._agents = team.progress.agents
        self.of_nodes = FETCHED if self._agents else ()
        """The totals of the nodes that `rest` takes."""
        self._workers = workers
        self._fetched: Mapping[str, int] = dict.fromkeys(FETCHED, 0)
        if self._agents:
            with suppress(NodeUnavailableError):  # one that is started again counts from 0
                self._fetched = client.total(FETCHED)

    def add(self, meter: StepMeter) -> None:
        """Add what this controller's ranks sent to other hosts since the last call."""
        if not self._agents:
            return
        for of_rank in self._workers.on_my_ranks("take_sent_bytes"):
            for kind in OF_RANKS:
                meter.add_sum(f"hosts/{kind}_bytes", of_rank.get(kind, 0))

    def rest(self, record: Mapping[str, float], totals: Mapping[str, int]) -> dict[str, float]:
        """Return the metrics that belong to the run as a whole: what nodes fetched from each other, and all that hosts
        sent besides what has a kind. `record`: that of the step, with what the ranks sent. `totals`: those of
        `of_nodes` now."""
        if not self._agents:
            return {}
        calls = [("the agent of a host", agent.take_sent_bytes.remote()) for agent in self._agents]
        sent = wait_all(calls, what="saying what it sent", deadline_s=REPLY_S)
        now = {name: totals[name] for name in self.of_nodes}
        # a node that was started again counts from 0
        fetched = {name: num - self._fetched[name] if num >= self._fetched[name] else num for name, num in now.items()}
        self._fetched = now
        kinds: dict[str, float] = {
            "hosts/media_bytes": fetched["fetched_bytes"] - fetched["fetched_plain_bytes"],
            "hosts/rollouts_bytes": fetched["fetched_plain_bytes"],
        }
        if None in sent:
            return kinds
        of_a_kind = sum(kinds.values()) + sum(record.get(f"hosts/{kind}_bytes", 0) for kind in OF_RANKS)
        return {**kinds, "hosts/control_bytes": max(0, sum(sent) - of_a_kind)}
