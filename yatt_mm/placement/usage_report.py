"""Metrics of placement in a step: which role held the devices, how long transitions took, and why cells moved.

The coordinator collects here, and a controller takes the report. Pure bookkeeping: nothing is decided in this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yatt_mm.placement.device_ledger import LedgerSpan
from yatt_mm.placement.engine_pool import EnginePool
from yatt_mm.placement.engine_time import EngineTime
from yatt_mm.placement.policy import Decision, Moment
from yatt_mm.protocol.placement_model import STATES, Phase, Placement, Role, State


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """The report of what happened on the devices since the last report."""

    metrics: Mapping[str, float]
    decisions: tuple[Mapping[str, Any], ...]
    """One record per decision on how cells are divided: step, time_s, moment, split, reason."""
    spans: tuple[LedgerSpan, ...]


class Usage:
    """The coordinator's collector: takes phases, transitions and decisions, and makes a `UsageReport` of them."""

    def __init__(self, pools: Mapping[Role, tuple[EnginePool, ...]], placement: Placement) -> None:
        self.num_moves = 0
        self._pools = pools
        self._is_partial = placement.is_partial
        self._phase: Phase | None = None
        self._step = 0
        self._started_s = 0.0
        self._before: dict[Role, EngineTime] = {}
        self._phase_s: dict[Role, float] = {}
        self._held_s: dict[Role, float] = {}
        self._judging_s = 0.0
        self._transitions: dict[str, float] = {}
        self._decisions: list[dict[str, Any]] = []

    def begin(self, phase: Phase | None, step: int, *, now_s: float) -> None:
        """Start another phase; None means a phase that does not count in the metrics."""
        self._end_phase(now_s)
        self._phase, self._step, self._started_s = phase, step, now_s
        self._before = {role: self._times(role, now_s) for role, pools in self._pools.items() if pools}

    def add_transition(self, role: Role, state: State, seconds: float, held_bytes: int) -> None:
        """Note that a unit took `seconds` to change to `state`, and now holds `held_bytes`.

        The units of a role usually change at the same time, so the metrics keep the slowest and the largest.
        """
        found = {
            f"placement/{role}_{'wake' if state is State.AWAKE else 'sleep'}_s_max": seconds,
            f"placement/{role}_{state}_bytes_max": float(held_bytes),
        }
        for name, value in found.items():
            self._transitions[name] = max(self._transitions.get(name, 0.0), value)

    def add_decision(self, moment: Moment, decision: Decision, *, now_s: float) -> None:
        """Record a decision on how cells are divided."""
        self._decisions.append(
            {
                "step": self._step,
                "time_s": now_s,
                "moment": str(moment),
                "split": str(decision.split),
                "reason": decision.reason,
            }
        )

    def take(self, spans: list[LedgerSpan], *, now_s: float) -> UsageReport:
        """Return what was collected since the last call, and start again."""
        self._end_phase(now_s)
        self._phase = None
        metrics = dict(self._transitions)
        for role, held_s in self._held_s.items():
            if self._phase_s[role]:
                metrics[f"placement/{role}_devices"] = held_s / self._phase_s[role]
        if self._is_partial:
            metrics |= {"placement/num_moves": self.num_moves, "time/genrm_s": self._judging_s}
        report = UsageReport(metrics=metrics, decisions=tuple(self._decisions), spans=tuple(spans))
        self.num_moves, self._judging_s = 0, 0.0
        self._transitions, self._phase_s, self._held_s, self._decisions = {}, {}, {}, []
        return report

    def _end_phase(self, now_s: float) -> None:
        """End the present phase: add its times to the totals, if it is a phase whose metrics are wanted (`begin`)."""
        if self._phase is None:
            return
        for role, before in self._before.items():
            times = self._times(role, now_s).since(before)
            if STATES[self._phase][role] is State.AWAKE:
                self._phase_s[role] = self._phase_s.get(role, 0.0) + now_s - self._started_s
                self._held_s[role] = self._held_s.get(role, 0.0) + times.held_s
            if role is Role.GENRM:
                self._judging_s += times.any_active_s

    def _times(self, role: Role, now_s: float) -> EngineTime:
        """Return the total times of a role's pools, which share their devices in partial colocation."""
        times = [pool.times(now_s=now_s) for pool in self._pools[role]]
        share = max(1, sum(pool.devices_per_engine > 0 for pool in self._pools[role])) if self._is_partial else 1
        return EngineTime(
            any_active_s=max(one.any_active_s for one in times), held_s=sum(one.held_s for one in times) / share
        )
