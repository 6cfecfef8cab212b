"""How cells are divided between rollout and GenRM: measured load in, a new split and its reason out. Pure arithmetic.

A *cell* is the devices that hold whole engines of both roles; moving one means waking the other engine there. Two
questions, two answers:

* `Moment.STEP`, before a generation phase (nothing is awake, so moving is free): divide the cells so that the last
  phase's work would have ended soonest. With work a and b in cell-seconds a split (r, g) takes max(a / r, b / g) when
  both work side by side. Where the balance lies between two splits, the one with more rollout takes less: its cells
  help GenRM when the last answer is there, and GenRM's could not help rollout.
* `Moment.GENERATION`, inside the phase: GenRM lends its cells until the first answers are there, if that took long
  enough in the last phase. Later rollout alone lends, the cells that its requests no longer fill, if GenRM has requests
  waiting; it gets them back when its own wait. What is left of rollout is crowded on fewer cells then, so GenRM must
  gain more than that costs. Nothing is taken from a role whose cells are full: the answers that are left late in a
  phase are the long ones, and nobody knows how long. A role with requests keeps its last cell.

Hysteresis: a split is kept unless the predicted gain is above `min_gain_frac` of the time, and inside a phase above
what moving costs. No clock, no state, no torch: a run's coordinator and the simulator call the same function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

FULL_SLOWDOWN = 1.25
"""A cell counts as full when each of its requests is this much slower than alone."""


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
    from 0 to 1 (see `yatt_mm.placement.engine_time`)."""
    held_s: float
    """Cell-seconds that the role had in that time; `busy_frac` of them were work."""
    num_running: int = 0
    """Requests that cells work on now."""
    num_waiting: int = 0
    """Requests that no cell works on yet."""
    requests_per_cell: float = 1.0
    """Requests that fill a cell (see `FULL_SLOWDOWN`)."""
    request_s: float = 0.0
    """Cell-seconds of work per request, as measured (busy time by requests done)."""

    @property
    def work_s(self) -> float:
        """Cell-seconds of work measured."""
        return self.busy_frac * self.held_s

    @property
    def num_present(self) -> int:
        """Requests that cells work on, or will."""
        return self.num_running + self.num_waiting

    @property
    def num_cells_filled(self) -> int:
        """Cells that the requests now present fill."""
        return math.ceil(self.num_present / self.requests_per_cell - 1e-9)

    @property
    def num_cells_wanted(self) -> int:
        """Cells more that waiting requests would fill."""
        return math.ceil(self.num_waiting / self.requests_per_cell - 1e-9)


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
    genrm_lead_s: float = 0.0
    """Seconds for which GenRM will have nothing to judge, by the last phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A split, and why, in one sentence with the numbers."""

    split: Split
    reason: str
    refused: Split | None = None
    """What would have been better, did moving not cost more."""


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
        return _divide(split, options, observation, bounds)
    return _decide_inside(split, observation, bounds)


def phase_s(split: Split, rollout_work_s: float, genrm_work_s: float) -> float:
    """Seconds for both roles' work (cell-seconds) side by side; infinite when work has no cell."""
    return max(_role_s(rollout_work_s, split.rollout), _role_s(genrm_work_s, split.genrm))


def _divide(split: Split, options: list[Split], observation: Observation, bounds: Bounds) -> Decision:
    rollout_work_s, genrm_work_s = observation.rollout.work_s, observation.genrm.work_s
    num_cells, total_s = split.num_cells, rollout_work_s + genrm_work_s
    num_helping = min(num_cells - bounds.min_rollout, bounds.max_genrm)

    def takes_s(option: Split) -> float:
        """Seconds of the phase; where the balance lies between two splits, with help for GenRM from rollout's cells."""
        alone_s = phase_s(option, rollout_work_s, genrm_work_s)
        rollout_s = _role_s(rollout_work_s, option.rollout)
        is_next_to_balance = 0 < option.rollout * total_s - num_cells * rollout_work_s < total_s
        if not is_next_to_balance or math.isinf(alone_s):
            return alone_s
        left_s = genrm_work_s - option.genrm * rollout_s
        return min(alone_s, rollout_s + observation.move_s + left_s / num_helping)

    now_s = takes_s(split)
    best = min(options, key=lambda option: (takes_s(option), abs(option.rollout - split.rollout), option.rollout))
    best_s = takes_s(best)
    work = f"last phase: {rollout_work_s:.4g} cell-s of rollout, {genrm_work_s:.4g} of GenRM"
    if math.isinf(now_s) and not math.isinf(best_s):
        return Decision(split=best, reason=f"{work}; {split} leaves a role with work but no cell, {best} does not")
    gain_s = 0.0 if math.isinf(now_s) else now_s - best_s
    wanted_s = bounds.min_gain_frac * now_s
    if best == split or gain_s <= wanted_s:
        saving = f"{best} would save {gain_s:.3g} s, not more than {wanted_s:.3g} s"
        return Decision(split=split, reason=f"{work}; {saving}: {split} stays")
    return Decision(split=best, reason=f"{work}; {best} takes {best_s:.4g} s where {split} takes {now_s:.4g} s")


def _decide_inside(split: Split, observation: Observation, bounds: Bounds) -> Decision:
    rollout, genrm, move_s = observation.rollout, observation.genrm, observation.move_s
    planned = observation.planned or split
    most_to_rollout = min(split.genrm - _least(bounds.min_genrm, genrm), bounds.max_rollout - split.rollout)
    most_to_genrm = min(split.rollout - _least(bounds.min_rollout, rollout), bounds.max_genrm - split.genrm)
    missing = max(planned.genrm, 1) - split.genrm if genrm.num_waiting else 0
    if (num_back := min(missing, most_to_genrm)) > 0:
        new = _moved(split, num_back)
        facts = f"GenRM has {genrm.num_present} requests and {split.genrm} of {planned.genrm} cells"
        return Decision(split=new, reason=f"{facts}; rollout gives it {num_back}: {new}")
    if (num_back := min(_num_missing(rollout, split.rollout, planned.rollout), most_to_rollout)) > 0:
        new = _moved(split, -num_back)
        facts = f"rollout has {rollout.num_present} requests and {split.rollout} of {planned.rollout} cells"
        return Decision(split=new, reason=f"{facts}; GenRM gives {num_back} back: {new}")
    is_worth_it = observation.genrm_lead_s - 2 * move_s > move_s  # there and back, and hysteresis
    if is_worth_it and not genrm.num_present and (num_lent := min(rollout.num_cells_wanted, most_to_rollout)) > 0:
        new = _moved(split, -num_lent)
        facts = f"GenRM has nothing to do for {observation.genrm_lead_s:.3g} s, by the last phase"
        return Decision(split=new, reason=f"{facts}; rollout has {rollout.num_waiting} waiting: {new}")
    if (num_lent := min(split.rollout - rollout.num_cells_filled, genrm.num_cells_wanted, most_to_genrm)) > 0:
        return _lend(split, _moved(split, num_lent), observation)
    return Decision(split=split, reason=f"no cell is idle that waiting requests could fill: {split} stays")


def _least(bound: int, load: RoleLoad) -> int:
    """Cells that a role keeps: one at least while it has requests, or cells would go there and back."""
    return max(bound, 1 if load.num_present else 0)


def _num_missing(load: RoleLoad, num_cells: int, num_planned: int) -> int:
    """Cells that were lent and that waiting requests would fill; one where there is no cell at all."""
    if not load.num_waiting:
        return 0
    return max(0 if num_cells else 1, min(num_planned - num_cells, load.num_cells_wanted))


def _lend(split: Split, new: Split, observation: Observation) -> Decision:
    """Cells of rollout to GenRM, which has some already."""
    rollout, genrm, move_s = observation.rollout, observation.genrm, observation.move_s
    work_s = genrm.num_present * genrm.request_s
    num_moved = new.genrm - split.genrm
    gain_s = work_s / split.genrm - max(move_s, (work_s + num_moved * move_s) / new.genrm)
    # rollouts that end with the last verdicts would end so much later
    crowding_s = (FULL_SLOWDOWN - 1) * work_s / new.genrm if rollout.num_present else 0.0
    facts = (
        f"rollout fills {rollout.num_cells_filled} of {split.rollout} cells, GenRM has {genrm.num_waiting} waiting; "
        f"{new} saves about {gain_s:.3g} s"
    )
    if gain_s > move_s + crowding_s:
        return Decision(split=new, reason=facts)
    costs = f"moving costs {move_s:.3g} s and crowded rollouts {crowding_s:.3g} s"
    return Decision(split=split, reason=f"{facts}, {costs}: {split} stays", refused=new if work_s else None)


def _moved(split: Split, num_to_genrm: int) -> Split:
    return Split(rollout=split.rollout - num_to_genrm, genrm=split.genrm + num_to_genrm)


def _role_s(work_s: float, num_cells: int) -> float:
    if work_s <= 0:
        return 0.0
    return work_s / num_cells if num_cells else math.inf
