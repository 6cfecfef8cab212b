"""How cells are divided between rollout and GenRM: measured load in, a new split and its reason out. Pure arithmetic.

A *cell* is the devices that hold whole engines of both roles; moving one means waking the other engine there. Two
questions, two answers:

* `Moment.STEP`, before a generation phase (nothing is awake, so moving is free): divide the cells so that both roles
  would have finished the last phase's work at the same time. With work a and b in cell-seconds a split (r, g) takes
  max(a / r, b / g) when both work side by side.
* `Moment.GENERATION`, inside the phase: a role that runs dry (GenRM at the start, rollout in the long tail) lends the
  cells that its requests no longer fill, if the other has requests waiting; they come back when its own requests wait.
  Cells that will be wanted again are lent only after they stood idle for as long as moving there and back costs, which
  is never worse than twice the best choice in hindsight (the ski-rental rule). Nothing is taken from a role whose
  cells are full: the responses that are left late in a phase are the long ones, and nobody knows how long.

Hysteresis: a split is kept unless the predicted gain is above `min_gain_frac` of the time, and inside a phase above
what moving costs. No clock, no state, no torch: a run's coordinator and the simulator call the same function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Moment(StrEnum):
    """When a decision is made."""

    STEP = "step"
    GENERATION = "generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Cells of each role."""

    rollout: int
    genrm: int

    @property
    def num_cells(self) -> int:
        """All cells."""
        return self.rollout + self.genrm

    def __str__(self) -> str:
        return f"{self.rollout}+{self.genrm}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the config allows."""

    min_rollout: int = 0
    """Cells that rollout keeps in any case; 0 lets the last one go when all rollouts are done."""
    max_rollout: int
    min_genrm: int = 0
    max_genrm: int
    min_gain_frac: float = 0.03
    """Share of the predicted time that a new split must save."""

    def allows(self, split: Split) -> bool:
        """True when both roles are within their limits."""
        return self.min_rollout <= split.rollout <= self.max_rollout and self.min_genrm <= split.genrm <= self.max_genrm


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """What was measured of one role."""

    busy_frac: float
    """Share of the cells' time in the last phase (STEP) or so far in this one (GENERATION) that was filled with work,
    from 0 to 1. For rollout any time with a request counts: responses take as long as they take. For GenRM, which
    waits for them, a cell with fewer requests than `requests_per_cell` counts in proportion."""
    held_s: float
    """Cell-seconds that the role had in that time; `busy_frac` of them were work."""
    num_running: int = 0
    """Requests that cells work on now."""
    num_waiting: int = 0
    """Requests that no cell works on yet."""
    num_coming: int = 0
    """Requests that will reach this role later in the phase (for GenRM: unfinished rollouts)."""
    requests_per_cell: float = 1.0
    """Requests that a cell works on side by side before they slow each other down much."""
    request_s: float = 0.0
    """Cell-seconds of work per request, as measured (busy time by requests done)."""
    idle_s: float = 0.0
    """How long the role has had fewer requests than its cells take."""

    @property
    def work_s(self) -> float:
        """Cell-seconds of work measured."""
        return self.busy_frac * self.held_s

    @property
    def num_cells_filled(self) -> int:
        """Cells that the requests now present fill."""
        return math.ceil((self.num_running + self.num_waiting) / self.requests_per_cell - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything a decision looks at."""

    moment: Moment
    rollout: RoleLoad
    genrm: RoleLoad
    move_s: float = 0.0
    """Seconds that a cell is out of work when it moves: one engine asleep, the other awake, requests handed over."""
    planned: Split | None = None
    """The split with which the phase began; None is the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A split, and why, in one sentence with the numbers."""

    split: Split
    reason: str


def decide(split: Split, observation: Observation, bounds: Bounds) -> Decision:
    """The split to go on with.

    Raises:
        ValueError: no split of these cells is within the bounds.
    """
    num_cells = split.num_cells
    options = [
        Split(rollout=rollout, genrm=num_cells - rollout)
        for rollout in range(num_cells + 1)
        if bounds.allows(Split(rollout=rollout, genrm=num_cells - rollout))
    ]
    if not options:
        raise ValueError(
            f"{num_cells} cells cannot be divided into {bounds.min_rollout} to {bounds.max_rollout} for rollout and "
            f"{bounds.min_genrm} to {bounds.max_genrm} for GenRM; widen the bounds"
        )
    if not bounds.allows(split):
        nearest = min(options, key=lambda option: abs(option.rollout - split.rollout))
        return Decision(split=nearest, reason=f"{split} is outside the bounds; {nearest} is the nearest split within")
    if observation.moment is Moment.STEP:
        return _divide(split, options, bounds, observation.rollout.work_s, observation.genrm.work_s)
    return _decide_inside(split, observation, bounds)


def phase_s(split: Split, rollout_work_s: float, genrm_work_s: float) -> float:
    """Seconds for both roles' work (cell-seconds) side by side; infinite when work has no cell."""
    return max(_role_s(rollout_work_s, split.rollout), _role_s(genrm_work_s, split.genrm))


def _divide(split: Split, options: list[Split], bounds: Bounds, rollout_work_s: float, genrm_work_s: float) -> Decision:
    now_s = phase_s(split, rollout_work_s, genrm_work_s)
    best = min(
        options, key=lambda o: (phase_s(o, rollout_work_s, genrm_work_s), abs(o.rollout - split.rollout), o.rollout)
    )
    best_s = phase_s(best, rollout_work_s, genrm_work_s)
    work = f"last phase: {rollout_work_s:.4g} cell-s of rollout, {genrm_work_s:.4g} of GenRM"
    if math.isinf(now_s) and not math.isinf(best_s):
        return Decision(split=best, reason=f"{work}; {split} leaves a role with work but no cell, {best} does not")
    gain_s = 0.0 if math.isinf(now_s) else now_s - best_s
    wanted_s = bounds.min_gain_frac * now_s
    if best == split or gain_s <= wanted_s:
        saving = f"{best} would save {gain_s:.3g} s, not more than {wanted_s:.3g} s"
        return Decision(split=split, reason=f"{work}; {saving}: {split} stays")
    return Decision(split=best, reason=f"{work}; {best} takes {best_s:.4g} s where {split} takes {now_s:.4g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    name: str
    load: RoleLoad
    num_cells: int
    planned: int
    least: int
    most: int

    @property
    def num_missing(self) -> int:
        """Cells that were lent and would be filled again; one where there is work and no cell at all.

        Cells that are back get what waits and what comes, not what others work on already.
        """
        if not self.load.num_waiting and not self.load.num_coming:
            return 0
        least = 1 if self.load.num_waiting and not self.num_cells else 0
        unfilled = max(self.num_wanted, self.load.num_cells_filled - self.num_cells)
        return max(least, min(self.planned - self.num_cells, unfilled))

    @property
    def num_spare(self) -> int:
        """Cells that the requests now present do not fill."""
        return self.num_cells - max(self.load.num_cells_filled, self.least)

    @property
    def num_wanted(self) -> int:
        """Cells more that waiting requests would fill."""
        return math.ceil(self.load.num_waiting / self.load.requests_per_cell - 1e-9)


def _decide_inside(split: Split, observation: Observation, bounds: Bounds) -> Decision:
    planned = observation.planned or split
    rollout = _Side(
        name="rollout",
        load=observation.rollout,
        num_cells=split.rollout,
        planned=planned.rollout,
        least=bounds.min_rollout,
        most=bounds.max_rollout,
    )
    genrm = _Side(
        name="GenRM",
        load=observation.genrm,
        num_cells=split.genrm,
        planned=planned.genrm,
        least=bounds.min_genrm,
        most=bounds.max_genrm,
    )
    pairs = ((rollout, genrm, 1), (genrm, rollout, -1))
    for giver, taker, sign in pairs:
        num_back = min(taker.num_missing, giver.num_cells - giver.least, taker.most - taker.num_cells)
        if num_back > 0:
            new = Split(rollout=split.rollout - sign * num_back, genrm=split.genrm + sign * num_back)
            num_present = taker.load.num_running + taker.load.num_waiting
            facts = f"{taker.name} has {num_present} requests and {taker.num_cells} of {taker.planned} cells"
            return Decision(split=new, reason=f"{facts}; {giver.name} gives {num_back} back: {new}")
    for giver, taker, sign in pairs:
        num_moved = min(giver.num_spare, taker.num_wanted, taker.most - taker.num_cells)
        if num_moved > 0:
            new = Split(rollout=split.rollout - sign * num_moved, genrm=split.genrm + sign * num_moved)
            return _lend(split, new, giver, taker, observation.move_s)
    return Decision(split=split, reason=f"no cell is idle that waiting requests could fill: {split} stays")


def _lend(split: Split, new: Split, giver: _Side, taker: _Side, move_s: float) -> Decision:
    facts = (
        f"{giver.name} fills {giver.load.num_cells_filled} of {giver.num_cells} cells, "
        f"{taker.name} has {taker.load.num_waiting} waiting"
    )
    if giver.load.num_coming and giver.load.idle_s < 2 * move_s:
        idle = f"idle for {giver.load.idle_s:.3g} s only and moving there and back costs {2 * move_s:.3g} s"
        return Decision(split=split, reason=f"{facts}; {idle}: {split} stays")
    gain_s = _gain_s(taker.load, taker.num_cells, abs(new.rollout - split.rollout), move_s)
    if gain_s <= move_s:
        return Decision(
            split=split,
            reason=f"{facts}; {new} would save {gain_s:.3g} s and moving costs {move_s:.3g} s: {split} stays",
        )
    return Decision(split=new, reason=f"{facts}; {new} saves about {gain_s:.3g} s")


def _gain_s(taker: RoleLoad, num_cells: int, num_moved: int, move_s: float) -> float:
    """Seconds by which the taker's present requests end sooner with `num_moved` cells more, from `move_s` on."""
    work_s = (taker.num_running + taker.num_waiting) * taker.request_s
    if num_cells == 0:
        return math.inf
    return work_s / num_cells - max(move_s, (work_s + num_moved * move_s) / (num_cells + num_moved))


def _role_s(work_s: float, num_cells: int) -> float:
    if work_s <= 0:
        return 0.0
    return work_s / num_cells if num_cells else math.inf
