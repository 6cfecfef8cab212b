"""The record of a step: what all controllers measured, merged, and what the run's parts count themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.core.process import return_freed_memory
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.control.best_model import BestModel
from yatt_mm.control.host_bytes import HostBytes
from yatt_mm.control.kept_rollouts import KeptRollouts
from yatt_mm.control.kl_coefficient import KlCoefficient
from yatt_mm.control.run_client import RunClient
from yatt_mm.control.worker_calls import WorkerCalls
from yatt_mm.generation.metrics import add_judges, finish_update, resident_bytes
from yatt_mm.placement.coordinator_client import CoordinatorClient
from yatt_mm.protocol.control import Team
from yatt_mm.protocol.step_meter import StepMeter, merge

OF_NODE = ("num_media", "num_processed", "num_recomputed", "num_evicted", "used_bytes", "processed_bytes")
"""The values of the nodes' `stat` that are metrics."""


class StepReport:
    """One controller's part of the records. Controller 0 hands over what is the run's as a whole."""

    def __init__(
        self,
        team: Team,
        client: RunClient,
        rendezvous: RendezvousClient,
        coordinator: CoordinatorClient,
        workers: WorkerCalls,
        kept: KeptRollouts,
        meter: StepMeter,
        best: BestModel,
        kl: KlCoefficient,
        *,
        controller: int,
    ) -> None:
        self.phases: list[tuple[str, float, float]] = []
        """(name, begin, end) in seconds since the epoch, for the timeline."""
        self._team = team
        self._client = client
        self._rendezvous = rendezvous
        self._coordinator = coordinator
        self._workers = workers
        self._kept = kept
        self._meter = meter
        self._best = best
        self._kl = kl
        self._host_bytes = HostBytes(team, client, workers)
        self._index = controller
        self._step_started = time.perf_counter()

    def begin_step(self) -> None:
        """Begin to take the time of a step."""
        self._step_started = time.perf_counter()

    def hand_over(self) -> None:
        """Merge all controllers' metrics into the step's record. Controller 0 hands it over."""
        self._rendezvous.phase = "report"
        with self._meter.timed("time/keep_s"):
            self._kept.finish()
        return_freed_memory()
        self._meter.add_max("controller/rss_bytes_max", resident_bytes())
        if self._team.judges:
            add_judges(self._meter, self._workers.on_my_judges("metrics"))
        self._host_bytes.add(self._meter)
        self._meter.add_max("time/step_s", time.perf_counter() - self._step_started)
        meters = self._rendezvous.gather(self._meter.take())
        record = merge(meters)
        finish_update(record)
        record |= self._kl.take(record)
        self._best.take(self._rendezvous.step, record)
        if self._index:
            return
        record |= self.tell_usage() | self._best.metrics()
        totals = self._client.total((*OF_NODE, *self._host_bytes.of_nodes))
        record |= {f"dataplane/{name}": totals[name] for name in OF_NODE}
        engine_totals = self._workers.on_engines(range(len(self._team.engines)), "metrics")
        record |= self._host_bytes.rest(record, totals)
        record["rollout/ipc_bytes"] = sum(totals["ipc_bytes"] for totals in engine_totals)
        self._rendezvous.finish_step(record, self._best.best, self._kl.state)

    def tell_usage(self) -> dict[str, float]:
        """Hand over the record of which role used which device and why cells moved; return the metrics from it."""
        usage = self._coordinator.take_report()
        phases, self.phases = self.phases, []
        for decision in usage.decisions:
            self._rendezvous.put_record({"kind": "placement", **decision})
        timeline = {"spans": usage.spans, "phases": phases}
        self._rendezvous.put_record({"kind": "timeline", "step": self._rendezvous.step, **timeline})
        return dict(usage.metrics)

    def tell(self, notices: Sequence[Mapping[str, Any]]) -> None:
        """Hand over what is known of samples that cannot be used, and count what is new."""
        for notice in notices:
            is_new = self._rendezvous.put_record({"kind": "quarantine", "step": self._rendezvous.step, **notice})
            if is_new:  # it was not told before a fault
                self._meter.add_sum("data/num_filtered" if notice["is_filtered"] else "data/num_quarantined", 1)
