"""Three ways to move cells between rollout and GenRM during a generation phase: never, all at once in turns, or by the
real placement policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from yatt_mm.common.errors import ConfigError
from yatt_mm.placement.engine_time import EngineTime, work_s
from yatt_mm.placement.judge_idle import JudgeIdle
from yatt_mm.placement.policy import Bounds, Decision, Moment, Observation, RoleLoad, Split, decide
from yatt_mm.simulator.cells import Cells, Use
from yatt_mm.simulator.config import SimulationConfig
from yatt_mm.simulator.events import Events
from yatt_mm.simulator.fleet import Fleet
from yatt_mm.simulator.generation import GenerationPhase

MAX_DECISIONS = 10**5
"""The largest number of placement decisions in one generation phase. A normal run needs a few hundred; more than this
raises ConfigError."""


class CellMover(Protocol):
    """The interface of a rule that decides during a generation phase which cells change their role."""

    def first_split(self) -> Split:
        """Return how many cells each role has at the start of the next generation phase."""

    def begin(self) -> None:
        """Note that the generation phase has begun."""

    def changed(self) -> None:
        """Note that a request has ended."""

    def end(self) -> None:
        """Note that the generation phase is over."""


class Hands:
    """Moves single cells between rollout and GenRM. A cell does no work while it moves."""

    def __init__(self, config: SimulationConfig, generation: GenerationPhase, events: Events, cells: Cells) -> None:
        self.num_moving = 0
        self.num_moves = 0
        self._generation, self._events, self._cells = generation, events, cells
        self._phase = 0
        self.to_genrm_s = config.rollout.sleep_s.value + config.genrm.wake_s.value
        self.to_rollout_s = config.genrm.sleep_s.value + config.rollout.wake_s.value

    @property
    def move_s(self) -> float:
        """The seconds that a move takes in the slower of the two directions."""
        return max(self.to_genrm_s, self.to_rollout_s)

    def end_phase(self) -> None:
        """Cancel the moves in progress. Their cells do not get their new role in this phase."""
        self._phase += 1
        self.num_moving = 0

    def move(self, cell: int, use: Use) -> None:
        """Start to move a cell to the role `use`: put the other role to sleep now, and wake up the new role when the
        move's time has passed."""
        generation = self._generation
        is_to_genrm = use is Use.GENRM
        giver, taker = (generation.rollout, generation.genrm) if is_to_genrm else (generation.genrm, generation.rollout)
        giver.sleep(cell)
        self._cells.put(cell, Use.SWITCH, self._events.now_s)
        self.num_moving += 1
        self.num_moves += 1
        seconds = self.to_genrm_s if is_to_genrm else self.to_rollout_s
        phase = self._phase
        self._events.plan(self._events.now_s + seconds, lambda: self._arrive(cell, use, taker, phase))

    def _arrive(self, cell: int, use: Use, taker: Fleet, phase: int) -> None:
        if phase != self._phase:
            return
        self.num_moving -= 1
        self._cells.put(cell, use, self._events.now_s)
        taker.wake(cell)


class Fixed:
    """A cell mover that keeps the same split all the time."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def first_split(self) -> Split:
        """Return the split that was given to the constructor."""
        return self._split

    def begin(self) -> None:
        """Do nothing."""

    def changed(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class Turns:
    """A cell mover for full colocation: all cells sample, then all cells judge. This repeats while groups are
    replaced."""

    def __init__(self, generation: GenerationPhase, hands: Hands, num_cells: int) -> None:
        self._generation, self._hands, self._num_cells = generation, hands, num_cells

    def first_split(self) -> Split:
        """Return the split in which all cells sample."""
        return Split(rollout=self._num_cells, genrm=0)

    def begin(self) -> None:
        """Move all cells to judging at once if the phase starts with only unjudged responses and no prompts to
        sample."""
        self.changed()

    def changed(self) -> None:
        """Move all cells to the other role when the present role has no requests left and the other role has work."""
        rollout, genrm = self._generation.rollout, self._generation.genrm
        if self._hands.num_moving or self._generation.num_handing_over:
            return
        if rollout.cells and rollout.num_present == 0 and genrm.waiting:
            for cell in rollout.cells:
                self._hands.move(cell, Use.GENRM)
        elif genrm.cells and genrm.num_present == 0 and rollout.waiting:
            for cell in genrm.cells:
                self._hands.move(cell, Use.ROLLOUT)

    def end(self) -> None:
        """Do nothing."""


class ByPolicy:
    """A cell mover for partial colocation: the decisions of `yatt_mm.placement.policy` move the cells."""

    def __init__(
        self,
        config: SimulationConfig,
        generation: GenerationPhase,
        hands: Hands,
        events: Events,
        log: Callable[[Decision], None],
    ) -> None:
        self._config, self._generation, self._hands, self._events, self._log = config, generation, hands, events, log
        num = config.num_cells
        self._bounds = Bounds(max_rollout=num, max_genrm=num, min_gain_frac=config.placement.min_gain_frac)
        self._split = Split(rollout=(num + 1) // 2, genrm=num // 2)
        self._first_split = self._split
        self._is_on = False
        self._phase = 0
        self._num_decisions = 0
        self._lead = JudgeIdle(decide_every_s=config.placement.decide_every_s)
        self._start: dict[Fleet, tuple[EngineTime, int]] = {}
        self._before: dict[Fleet, tuple[float, int]] = {}
        """For each fleet, the seconds of work and the number of ended requests of the last phase. They are needed
        because few requests have ended when a phase starts."""

    def first_split(self) -> Split:
        """Return the split that follows from the last phase, or one half before the first phase."""
        generation = self._generation
        if self._start:
            observation = Observation(
                moment=Moment.STEP,
                rollout=self._load(generation.rollout),
                genrm=self._load(generation.genrm),
                move_s=self._hands.move_s,
            )
            decision = decide(self._first_split, observation, self._bounds)
            self._log(decision)
            self._first_split = decision.split
        self._split = self._first_split
        return self._split

    def begin(self) -> None:
        """Decide at intervals from now on."""
        self._is_on = True
        self._phase += 1
        self._num_decisions = 0
        self._lead.begin(self._events.now_s)
        for fleet in (self._generation.rollout, self._generation.genrm):
            self._start[fleet] = (fleet.times(), fleet.num_ended)
        self._plan()

    def changed(self) -> None:
        """Do nothing; the next decision will see the change."""

    def end(self) -> None:
        """End the phase, and keep what was measured in it for the next phase."""
        self._is_on = False
        for fleet in (self._generation.rollout, self._generation.genrm):
            times, num_ended = self._since_begin(fleet)
            self._before[fleet] = self._work_s(fleet, times), num_ended

    def _plan(self) -> None:
        phase = self._phase
        self._events.plan(self._events.now_s + self._config.placement.decide_every_s, lambda: self._tick(phase))

    def _tick(self, phase: int) -> None:
        if not self._is_on or phase != self._phase:
            return
        self._num_decisions += 1
        if self._num_decisions > MAX_DECISIONS:
            raise ConfigError(
                f"placement.decide_every_s is {self._config.placement.decide_every_s:g}; a generation phase has more "
                f"than {MAX_DECISIONS} times that: raise it, or look for a number in another unit"
            )
        if not self._hands.num_moving:
            self._decide()
        self._plan()

    def _decide(self) -> None:
        generation = self._generation
        observation = Observation(
            moment=Moment.GENERATION,
            rollout=self._load(generation.rollout),
            genrm=self._load(generation.genrm),
            move_s=self._hands.move_s,
            planned=self._first_split,
            genrm_lead_s=self._lead.left_s(generation.genrm.num_present, self._events.now_s),
        )
        decision = decide(self._split, observation, self._bounds)
        num_to_genrm = decision.split.genrm - self._split.genrm
        if num_to_genrm == 0:
            return
        self._log(decision)
        self._split = decision.split
        giver, use = (generation.rollout, Use.GENRM) if num_to_genrm > 0 else (generation.genrm, Use.ROLLOUT)
        for cell in giver.emptiest(abs(num_to_genrm)):
            self._hands.move(cell, use)

    def _since_begin(self, fleet: Fleet) -> tuple[EngineTime, int]:
        """Return times and requests of this phase so far."""
        before, ended_before = self._start[fleet]
        return fleet.times().since(before), fleet.num_ended - ended_before

    def _work_s(self, fleet: Fleet, times: EngineTime) -> float:
        is_replacing = self._config.sampling.replaces_groups
        return work_s(times, is_rollout=fleet is self._generation.rollout, is_replacing=is_replacing)

    def _load(self, fleet: Fleet) -> RoleLoad:
        times, num_ended = self._since_begin(fleet)
        done_s = self._work_s(fleet, times)
        work_before_s, num_ended_before = self._before.get(fleet, (0.0, 0))
        num_ended += num_ended_before
        return RoleLoad(
            busy_frac=done_s / times.held_s if times.held_s else 0.0,
            held_s=times.held_s,
            num_running=fleet.num_running,
            num_waiting=len(fleet.waiting),
            requests_per_cell=fleet.requests_per_cell,
            request_s=(work_before_s + done_s) / num_ended if num_ended else 0.0,
        )
