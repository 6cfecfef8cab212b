"""The rebalancer: measures load for the placement policy and keeps what it decided. Pure state.

The coordinator asks it before each generation phase and inside it. The policy itself, `yatt_mm.placement.policy`, is
the same that the simulator calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from yatt_mm.placement.engine_pool import EnginePool
from yatt_mm.placement.engine_time import EngineTime, work_s
from yatt_mm.placement.judge_idle import JudgeIdle
from yatt_mm.placement.policy import Bounds, Decision, Moment, Observation, RoleLoad, Split, decide
from yatt_mm.protocol.placement_model import Role

MOVE_MEMORY = 0.9
"""The factor on the longest move time, per phase: a move that was slow by chance must not stop all later moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDivision:
    """The config's rules for dividing cells between rollout and GenRM."""

    first: Split
    """The split of the first step; the split of all steps if `is_dynamic` is False."""
    bounds: Bounds
    is_dynamic: bool = True
    decide_every_s: float = 0.5
    """The seconds between decisions inside a generation phase."""
    is_replacing: bool = False
    """True if groups without signal are replaced (see `yatt_mm.placement.engine_time.work_s`)."""


class Rebalancer:
    """Calls the placement policy for the coordinator, with the load that the coordinator's pools measured."""

    def __init__(
        self, division: CellDivision, pools: Mapping[Role, tuple[EnginePool, ...]], *, cell_size: int = 1
    ) -> None:
        """`pools`: [role] its pools with engines in the cells; roles without any are left out.

        `cell_size`: devices per cell.
        """
        self._cell_size = cell_size
        self.planned = division.first
        """The split with which the present phase began."""
        self._division = division
        self._pools = pools
        self._start: dict[Role, tuple[EngineTime, int]] = {}
        self._last: dict[Role, tuple[float, int]] = {}
        """[role] Work (cell-seconds) and finished requests of the last phase, used because few requests have ended at
        the start of a phase."""
        self._move_s = 0.0
        self._lead = JudgeIdle(decide_every_s=division.decide_every_s)

    def begin(self, *, now_s: float) -> Decision:
        """Start a phase: return the split for it."""
        self._move_s *= MOVE_MEMORY
        decision = Decision(split=self.planned, reason=f"as configured: {self.planned}")
        if self._division.is_dynamic and self._start:
            observation = Observation(
                moment=Moment.STEP,
                rollout=self._load(Role.ROLLOUT, now_s),
                genrm=self._load(Role.GENRM, now_s),
                move_s=self._move_s,
            )
            decision = decide(self.planned, observation, self._division.bounds)
        for role in self._start:
            times, num_ended = self._since_begin(role, now_s)
            self._last[role] = self._work_s(role, times), num_ended
        self._start = {role: self._totals(role, now_s) for role in self._pools}
        self.planned = decision.split
        self._lead.begin(now_s)
        return decision

    def inside(self, split: Split, *, now_s: float) -> Decision:
        """Return the split to continue with inside the phase."""
        if not self._division.is_dynamic:
            return Decision(split=split, reason="static")
        genrm = self._load(Role.GENRM, now_s)
        observation = Observation(
            moment=Moment.GENERATION,
            rollout=self._load(Role.ROLLOUT, now_s),
            genrm=genrm,
            move_s=self._move_s,
            planned=self.planned,
            genrm_lead_s=self._lead.left_s(genrm.num_present, now_s),
        )
        return decide(split, observation, self._division.bounds)

    def note_move(self, seconds: float) -> None:
        """Note that a cell did no work for `seconds` while it moved.

        The placement policy gets the longest recent time (`MOVE_MEMORY`).
        """
        self._move_s = max(self._move_s, seconds)

    def _load(self, role: Role, now_s: float) -> RoleLoad:
        """Return the role's load since the phase began."""
        pools = self._pools[role]
        times, num_ended = self._since_begin(role, now_s)
        done_s = self._work_s(role, times)
        work_before_s, num_ended_before = self._last.get(role, (0.0, 0))
        num_ended += num_ended_before
        return RoleLoad(
            busy_frac=min(1.0, done_s / times.held_s) if times.held_s else 0.0,
            held_s=times.held_s,
            num_running=sum(pool.num_running for pool in pools),
            num_waiting=sum(pool.num_waiting for pool in pools),
            requests_per_cell=sum(
                pool.requests_per_engine * self._cell_size // pool.devices_per_engine for pool in pools
            ),
            request_s=(work_before_s + done_s) / num_ended if num_ended else 0.0,
        )

    def _since_begin(self, role: Role, now_s: float) -> tuple[EngineTime, int]:
        """Return times and finished requests of this phase so far."""
        (before, ended_before), (now, ended) = self._start[role], self._totals(role, now_s)
        return now.since(before), ended - ended_before

    def _work_s(self, role: Role, times: EngineTime) -> float:
        return work_s(times, is_rollout=role is Role.ROLLOUT, is_replacing=self._division.is_replacing)

    def _totals(self, role: Role, now_s: float) -> tuple[EngineTime, int]:
        """Return the role's total times, in cell-seconds, and finished requests.

        Several judges share their cells, so the times are the mean of the pools.
        """
        pools = self._pools[role]
        times, share = [pool.times(now_s=now_s) for pool in pools], 1 / (len(pools) * self._cell_size)
        return EngineTime(
            active_s=sum(one.active_s for one in times) * share,
            filled_s=sum(one.filled_s for one in times) * share,
            crowded_s=sum(one.crowded_s for one in times) * share,
            held_s=sum(one.held_s for one in times) * share,
        ), sum(pool.num_ended for pool in pools)
