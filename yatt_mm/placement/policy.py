"""The placement policy: how many cells rollout and GenRM get, decided from measured load. Pure arithmetic.

A *cell* is the devices of the largest engine; it holds whole engines of both roles. Moving a cell means waking up the
other role's engines there. `decide` decides two things:

* `Moment.STEP`, before a generation phase. Nothing is awake, so moving is free. The cells are divided so that the work
  of the last phase would have ended soonest. With a and b cell-seconds of work, a split (r, g) takes max(a / r, b / g)
  if both roles work at the same time. If the balance is between two splits, the split with more rollout takes less
  time: its cells can help GenRM after the last response, but GenRM's cells could not have helped rollout.
* `Moment.GENERATION`, inside the phase. GenRM lends its cells to rollout until the first responses are complete, if
  that took long enough in the last phase. Later only rollout lends: it gives GenRM the cells that its own requests no
  longer fill, if GenRM has requests waiting, and gets them back when its own requests wait. The remaining rollout
  requests are then crowded on fewer cells, so GenRM must gain more than that costs. No cell is taken from a role whose
  cells are full: the responses that are left late in a phase are the long ones, and their length is not known. A role
  with requests keeps its last cell.

Hysteresis: before a phase the split is kept unless the predicted gain is above `min_gain_frac` of the time, and inside
a phase unless the gain is above what moving costs. This module has no clock, no state and no torch: the coordinator of
a run and the simulator call the same function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

FULL_SLOWDOWN = 1.25
"""The slowdown of a full cell: a cell counts as full when each of its requests takes this many times as long as it
would take alone."""


class Moment(StrEnum):
    """The moment at which a decision is made: before a generation phase, or inside it."""

    STEP = "step"
    GENERATION = "generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The number of cells that each role has."""

    rollout: int
    genrm: int

    @property
    def num_cells(self) -> int:
        """Number of cells of both roles together."""
        return self.rollout + self.genrm

    def __str__(self) -> str:
        return f"{self.rollout}+{self.genrm}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The splits that the config allows."""

    min_rollout: int = 0
    """The number of cells that rollout always keeps. With 0 it may give away the last cell when all its responses are
    complete."""
    max_rollout: int
    min_genrm: int = 0
    max_genrm: int
    min_gain_frac: float = 0.03
    """The share of the predicted time that a new split must save, from 0 to 1."""

    def allows(self, split: Split) -> bool:
        """Return True if both roles are within their bounds."""
        return self.min_rollout <= split.rollout <= self.max_rollout and self.min_genrm <= split.genrm <= self.max_genrm


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """The measured load of one role."""

    busy_frac: float
    """A number from 0 to 1: the share of the role's cell time that was filled with work (see
    `yatt_mm.placement.engine_time`), in the last phase (STEP) or so far in this phase (GENERATION)."""
    held_s: float
    """The cell-seconds that the role had in that time, busy or not."""
    num_running: int = 0
    """The number of requests that cells work on now."""
    num_waiting: int = 0
    """The number of requests that no cell works on yet."""
    requests_per_cell: float = 1.0
    """The number of requests that fill a cell (see `FULL_SLOWDOWN`)."""
    request_s: float = 0.0
    """The cell-seconds of work per request: measured busy time divided by the number of finished requests."""

    @property
    def work_s(self) -> float:
        """Cell-seconds of measured work."""
        return self.busy_frac * self.held_s

    @property
    def num_present(self) -> int:
        """Number of requests that cells work on now or will work on."""
        return self.num_running + self.num_waiting

    @property
    def num_cells_filled(self) -> int:
        """Number of cells that the present requests fill, rounded up."""
        return math.ceil(self.num_present / self.requests_per_cell - 1e-9)

    @property
    def num_cells_wanted(self) -> int:
        """Number of additional cells that the waiting requests would fill, rounded up."""
        return math.ceil(self.num_waiting / self.requests_per_cell - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The measurements that a decision depends on."""

    moment: Moment
    rollout: RoleLoad
    genrm: RoleLoad
    move_s: float = 0.0
    """The seconds in which a cell does no work when it moves: one engine falls asleep, the other wakes up and gets
    requests."""
    planned: Split | None = None
    """The split with which the phase began; None means the present split."""
    genrm_lead_s: float = 0.0
    """Expected seconds in which GenRM will have nothing to judge, as measured in the last phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The split to use from now on, and the reason: one sentence with the numbers."""

    split: Split
    reason: str
    refused: Split | None = None
    """A split that would be better if moving did not cost more than it gains; None if there is none."""


def decide(split: Split, observation: Observation, bounds: Bounds) -> Decision:
    """Return the split to continue with, and why.

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
    """Return the seconds that both roles together need for their work (cell-seconds); infinite if work has no cell."""
    return max(_role_s(rollout_work_s, split.rollout), _role_s(genrm_work_s, split.genrm))


def _divide(split: Split, options: list[Split], observation: Observation, bounds: Bounds) -> Decision:
    """Decide before a phase: return the split in which the last phase's work would have ended soonest."""
    rollout_work_s, genrm_work_s = observation.rollout.work_s, observation.genrm.work_s
    num_cells, total_s = split.num_cells, rollout_work_s + genrm_work_s
    num_helping = min(num_cells - bounds.min_rollout, bounds.max_genrm)

    def takes_s(option: Split) -> float:
        """Return the seconds that the phase takes.

        If the best split would need a fraction of a cell between this one and the next, rollout's cells are assumed to
        help GenRM when rollout is done.
        """
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
    """Return the decision inside a phase: give lent cells back, or lend cells that are not filled, or keep the
    split."""
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
    # a lent cell moves there and back; the third move is hysteresis
    is_worth_it = observation.genrm_lead_s - 2 * move_s > move_s
    if is_worth_it and not genrm.num_present and (num_lent := min(rollout.num_cells_wanted, most_to_rollout)) > 0:
        new = _moved(split, -num_lent)
        facts = f"GenRM has nothing to do for {observation.genrm_lead_s:.3g} s, as in the last phase"
        return Decision(split=new, reason=f"{facts}; rollout has {rollout.num_waiting} waiting: {new}")
    if (num_lent := min(split.rollout - rollout.num_cells_filled, genrm.num_cells_wanted, most_to_genrm)) > 0:
        return _lend(split, _moved(split, num_lent), observation)
    return Decision(split=split, reason=f"no cell is idle that waiting requests could fill: {split} stays")


def _least(bound: int, load: RoleLoad) -> int:
    """Return the least number of cells that a role keeps: `bound`, and at least one while it has requests, so that the
    cell need not come back."""
    return max(bound, 1 if load.num_present else 0)


def _num_missing(load: RoleLoad, num_cells: int, num_planned: int) -> int:
    """Return how many of the cells that a role lent to the other role its waiting requests would fill; at least one if
    the role has no cell at all."""
    if not load.num_waiting:
        return 0
    return max(0 if num_cells else 1, min(num_planned - num_cells, load.num_cells_wanted))


def _lend(split: Split, new: Split, observation: Observation) -> Decision:
    """Return the decision whether rollout lends cells to GenRM, which already has some: only if the gain is above the
    costs."""
    rollout, genrm, move_s = observation.rollout, observation.genrm, observation.move_s
    work_s = genrm.num_present * genrm.request_s
    num_moved = new.genrm - split.genrm
    gain_s = work_s / split.genrm - max(move_s, (work_s + num_moved * move_s) / new.genrm)
    # seconds by which responses that end together with the last verdicts would end later
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
    """Return the split after `num_to_genrm` cells went to GenRM; a negative number goes to rollout."""
    return Split(rollout=split.rollout - num_to_genrm, genrm=split.genrm + num_to_genrm)


def _role_s(work_s: float, num_cells: int) -> float:
    """Return the seconds that one role needs for its work (cell-seconds); infinite if it has work but no cell."""
    if work_s <= 0:
        return 0.0
    return work_s / num_cells if num_cells else math.inf
