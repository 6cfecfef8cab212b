"""The results of a simulation: times of steps, means of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from yatt_mm.simulator.cells import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The simulated times and counts of one training step."""

    step_s: float
    rollout_s: float
    """The generation phase: from the first prompt until the batch is full, verdicts included."""
    train_s: float
    num_prompts_used: int
    num_groups: int
    """The number of groups that were trained on."""
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """The result of one layout (a way to divide the devices among the roles), as means over all steps."""

    name: str
    split: str
    """In words, which devices do what."""
    steps: tuple[StepTimes, ...]
    busy_frac: float
    """The share of all devices' time in which a request or an update was at work on them."""
    num_moves: int
    """The number of changes of a cell's role inside generation phases."""
    decisions: tuple[str, ...]
    """The reasons of the placement policy when it moved cells."""
    spans: tuple[Span, ...]
    policy_times: tuple[float, float] = (0.0, 0.0)
    """The cell-seconds of work of rollout and of GenRM, for layouts that divide cells by it."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return mean(step.step_s for step in self.steps)

    @property
    def rollout_s(self) -> float:
        """Mean seconds of a generation phase."""
        return mean(step.rollout_s for step in self.steps)
