"""Layouts in which generation, training and publishing take turns: full and partial colocation, and external GenRM."""

from __future__ import annotations

from yatt_mm.placement.policy import Split
from yatt_mm.simulator.cell_movers import ByPolicy, CellMover, Fixed, Hands, Turns
from yatt_mm.simulator.cells import Cells, Use
from yatt_mm.simulator.config import SimulationConfig
from yatt_mm.simulator.events import Events
from yatt_mm.simulator.generation import GenerationPhase
from yatt_mm.simulator.results import LayoutResult, StepTimes
from yatt_mm.simulator.training import update_time
from yatt_mm.simulator.workload import Workload

NUM_MEETINGS = 4
"""The number of meetings of all controllers in a step: prompts, plan, update, publish."""


def full(config: SimulationConfig) -> LayoutResult:
    """Simulate the layout in which every role uses every device, in turns. Return its result."""
    run = _Run(config, num_external=0)
    run.mover = Turns(run.generation, run.hands, config.num_cells)
    return run.result("full", f"all {config.devices.num} devices in turns")


def partial_static(config: SimulationConfig, num_rollout: int) -> LayoutResult:
    """Simulate the layout in which rollout and GenRM run at the same time on fixed cells, and training on all devices.
    Return its result."""
    run = _Run(config, num_external=0)
    run.mover = Fixed(Split(rollout=num_rollout, genrm=config.num_cells - num_rollout))
    return run.result("partial_static", _split_text(config, num_rollout))


def partial_dynamic(config: SimulationConfig) -> LayoutResult:
    """Simulate the layout of `partial_static`, but with cells that the placement policy moves. Return its result."""
    run = _Run(config, num_external=0)
    mover = ByPolicy(
        config,
        run.generation,
        run.hands,
        run.events,
        lambda decision: run.decisions.append(f"{run.events.now_s:.1f} s: {decision.split}: {decision.reason}"),
    )
    run.mover = mover
    return run.result("partial_dynamic", "moved by the policy")


def external(config: SimulationConfig, num_rollout: int, name: str) -> LayoutResult:
    """Simulate the layout in which GenRM has its own devices and is always awake, and rollout and training take turns
    on the others. Return its result."""
    num_external = config.num_cells - num_rollout
    run = _Run(config, num_external=num_external)
    run.mover = Fixed(Split(rollout=num_rollout, genrm=num_external))
    return run.result(name, _split_text(config, num_rollout))


class _Run:
    """The simulation of one layout, step by step."""

    def __init__(self, config: SimulationConfig, *, num_external: int) -> None:
        self.config = config
        self.events = Events()
        self.cells = Cells(config.num_cells)
        self.workload = Workload(config)
        holds = num_external > 0 and not config.external.streams
        self.generation = GenerationPhase(config, self.workload, self.events, holds_verdicts=holds)
        self.hands = Hands(config, self.generation, self.events, self.cells)
        self.mover: CellMover
        self.decisions: list[str] = []
        self._num_shared = config.num_cells - num_external
        self._external = range(self._num_shared, config.num_cells)
        self._train_cell_s = 0.0
        self._steps: list[StepTimes] = []

    def result(self, name: str, split: str) -> LayoutResult:
        """Run all steps and return the result."""
        for cell in self._external:
            self.cells.put(cell, Use.GENRM, 0.0)
            self.generation.genrm.wake(cell)
        for _ in range(self.config.run.steps):
            self._step()
        self.cells.close(self.events.now_s)
        self._check_conservation()
        rollout, genrm = self.generation.rollout.times(), self.generation.genrm.times()
        busy_s = rollout.active_s + genrm.active_s + self._train_cell_s
        return LayoutResult(
            name=name,
            split=split,
            steps=tuple(self._steps),
            busy_frac=busy_s / (self.config.num_cells * self.events.now_s),
            num_moves=self.hands.num_moves,
            decisions=tuple(self.decisions),
            spans=tuple(self.cells.spans),
            policy_times=(rollout.filled_s, genrm.filled_s),
        )

    def _step(self) -> None:
        config, events = self.config, self.events
        start_s = events.now_s
        split = self.mover.first_split()
        self._wake(split)
        generation_start_s = events.now_s
        self._generate()
        rollout_s = events.now_s - generation_start_s
        outcome = self.generation.end()
        prompts = [self.workload.prompt(position) for position in (*outcome.accepted, *outcome.fillers)]
        self._sleep()
        num_samples = len(prompts) * config.workload.group_size
        self._pass(_meetings_s(config, num_samples))
        update = update_time(config, prompts, self._num_shared * config.devices.per_cell)
        self._all(Use.TRAIN, update.seconds)
        self._train_cell_s += self._num_shared * update.seconds
        self._all(Use.SWITCH, config.training.sleep_s.value)
        self._all(Use.PUBLISH, config.publish_s.value)
        self.generation.version += 1
        self._steps.append(
            StepTimes(
                step_s=events.now_s - start_s,
                rollout_s=rollout_s,
                train_s=update.seconds,
                num_prompts_used=outcome.num_prompts_used,
                num_groups=len(prompts),
                imbalance=update.imbalance,
            )
        )

    def _wake(self, split: Split) -> None:
        """Wake up the engines of the step's first split. All begin when the slowest is awake."""
        config, generation = self.config, self.generation
        num_genrm = 0 if self._external else split.genrm
        seconds = max(
            config.rollout.wake_s.value if split.rollout else 0.0, config.genrm.wake_s.value if num_genrm else 0.0
        )
        self._all(Use.SWITCH, seconds)
        for cell in range(self._num_shared):
            is_rollout = cell < split.rollout
            self.cells.put(cell, Use.ROLLOUT if is_rollout else Use.GENRM, self.events.now_s)
            (generation.rollout if is_rollout else generation.genrm).wake(cell)

    def _generate(self) -> None:
        generation = self.generation
        generation.on_change = self.mover.changed
        generation.begin()
        self.mover.begin()
        self.events.run(lambda: generation.is_done)
        assert generation.is_done, "requests are left that no engine works on"
        self.mover.end()
        self.hands.end_phase()
        generation.on_change = _nothing

    def _sleep(self) -> None:
        """Put all roles on shared cells to sleep and wake up training."""
        config, generation = self.config, self.generation
        seconds = 0.0
        for fleet, speed in ((generation.rollout, config.rollout), (generation.genrm, config.genrm)):
            for cell in fleet.cells:
                if cell < self._num_shared:
                    fleet.sleep(cell)
                    seconds = max(seconds, speed.sleep_s.value)
        self._all(Use.SWITCH, seconds + config.training.wake_s.value)

    def _all(self, use: Use, seconds: float) -> None:
        """Give all shared cells the use `use` for `seconds`."""
        for cell in range(self._num_shared):
            if self.cells.use_of(cell) is not use:
                self.cells.put(cell, use, self.events.now_s)
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        """Let time pass. External judges may work meanwhile."""
        end_s = self.events.now_s + seconds
        self.events.plan(end_s, _nothing)
        self.events.run(lambda: self.events.now_s >= end_s)

    def _check_conservation(self) -> None:
        generation = self.generation
        tallies = ((generation.rollout, generation.rollout_tally), (generation.genrm, generation.genrm_tally))
        for fleet, tally in tallies:
            num_held = generation.num_held if fleet is generation.genrm else 0
            there = tally.num_ended + tally.num_aborted + fleet.num_present + num_held
            assert tally.num_dispatched == there, f"{tally.num_dispatched} requests dispatched, {there} accounted for"


def _meetings_s(config: SimulationConfig, num_samples: int) -> float:
    controllers = config.controllers
    per_meeting_s = controllers.meeting_s.value + controllers.num * controllers.meeting_per_controller_s.value
    return NUM_MEETINGS * per_meeting_s + num_samples * controllers.plan_per_sample_s.value


def _split_text(config: SimulationConfig, num_rollout: int) -> str:
    per_cell = config.devices.per_cell
    return f"{num_rollout * per_cell} rollout + {(config.num_cells - num_rollout) * per_cell} GenRM"


def _nothing() -> None:
    """Do nothing. Fleets call this when a request ends, but in this layout no cell moves."""
