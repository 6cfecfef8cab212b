"""Which groups make up a step's batch: DAPO's dynamic sampling and what is done about the long tail. Pure state.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group whose rewards are all equal teaches nothing and is
replaced by another prompt's, until the batch is full or a bound is reached. Over-dispatch keeps more groups under way
than the batch has room for, so that it fills without waiting for the slowest; what is still under way then is cut off.

A step is one `StepSampling`. Whoever owns it (the rendezvous in a run, the event loop in the simulator) repeats:

    while not step.is_done:
        step.start(draw(step.num_wanted))     # deal `num_wanted` further prompts out to the controllers
        step.finish(position, has_signal)     # when a group is judged; `lose` when it cannot be had
    outcome = step.outcome()                  # train, abort and carry these

It sees positions and one bit per group, so it costs the same for any number of controllers. A group's position is its
place in the run's one order of prompts. In deterministic mode new prompts are asked for only when nothing is under
way, and groups are taken in the order of their positions: then the batch depends neither on which group finishes first
nor on how many controllers there are. No I/O, no clock, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

PRIOR_WEIGHT = 8.0
"""Groups that the expected share of signal counts for, next to those seen in this step."""
MIN_SIGNAL_FRAC = 0.05
"""The share of groups with signal is never taken for less: it bounds how many prompts one refill asks for."""


class Tail(StrEnum):
    """What becomes of groups that are under way when the batch is full."""

    DROP = "drop"
    """Aborted; their prompts come again when the data set does."""
    RESTART = "restart"
    """Aborted; their prompts are the first of the next step, answered anew by the new policy."""
    CONTINUE = "continue"
    """Aborted with the tokens they have; the next step begins with them and keeps every token's policy version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRule:
    """The part that the config decides."""

    num_groups: int
    """Groups that a full batch has."""
    replaces_groups: bool = False
    """True replaces groups without signal (DAPO); False takes every group."""
    max_prompts: int
    """Most prompts a step may use, those carried over included."""
    over_dispatch: float = 1.0
    """Groups under way per group still missing; 1 waits for the slowest."""
    tail: Tail = Tail.DROP
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ValueError(f"num_groups is {self.num_groups}; a batch needs at least 1 group")
        if self.max_prompts < self.num_groups:
            raise ValueError(
                f"max_prompts is {self.max_prompts}, fewer than the batch's {self.num_groups} groups; raise it"
            )
        if self.over_dispatch < 1:
            raise ValueError(f"over_dispatch is {self.over_dispatch}; it must be at least 1 (1 is none)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOutcome:
    """How a step's batch was filled. Every prompt that was used is in exactly one of the tuples, in cursor order."""

    accepted: tuple[int, ...]
    """Groups to train on."""
    fillers: tuple[int, ...]
    """Groups without signal that keep the batch at its size when the bound was reached; their advantages are 0."""
    rejected: tuple[int, ...]
    """Groups without signal that were replaced."""
    lost: tuple[int, ...]
    """Groups that could not be had."""
    dropped: tuple[int, ...]
    """Groups that were not needed any more, and whose prompts are not carried over."""
    carried: tuple[int, ...]
    """Groups with which the next step begins."""
    expected_signal_frac: float
    """What the next step should expect, from 0 to 1."""

    @property
    def num_prompts_used(self) -> int:
        """Prompts that the step drew or was carried."""
        parts = (self.accepted, self.fillers, self.rejected, self.lost, self.dropped, self.carried)
        return sum(len(part) for part in parts)


class StepSampling:
    """One step's batch while it fills."""

    def __init__(self, rule: SamplingRule, *, carried: Iterable[int] = (), expected_signal_frac: float = 1.0) -> None:
        """`carried` and `expected_signal_frac` come from the last step's outcome; the former are under way at once."""
        self.rule = rule
        self._prior = expected_signal_frac if rule.replaces_groups else 1.0
        self._flying: set[int] = set()
        self._with_signal: set[int] = set()
        self._without: set[int] = set()
        self._lost: set[int] = set()
        self._num_used = 0
        self.start(carried)

    @property
    def num_wanted(self) -> int:
        """Further prompts to start now; 0 when enough are under way or the bound is reached."""
        if self.is_full or (self.rule.deterministic and self._flying):
            return 0
        missing = self.rule.num_groups - len(self._with_signal)
        factor = 1.0 if self.rule.deterministic else self.rule.over_dispatch
        goal = math.ceil(factor * missing / max(self.signal_frac, MIN_SIGNAL_FRAC))
        return max(0, min(goal - len(self._flying), self.rule.max_prompts - self._num_used))

    @property
    def signal_frac(self) -> float:
        """Expected share of groups with signal: those judged in this step, and what was expected before."""
        num_judged = len(self._with_signal) + len(self._without)
        return (len(self._with_signal) + PRIOR_WEIGHT * self._prior) / (num_judged + PRIOR_WEIGHT)

    @property
    def num_used(self) -> int:
        """Prompts that count toward the bound."""
        return self._num_used

    def spend(self, count: int) -> None:
        """So many prompts were begun elsewhere for this step, and cut off."""
        self._num_used += count

    @property
    def num_flying(self) -> int:
        """Groups under way."""
        return len(self._flying)

    @property
    def is_full(self) -> bool:
        """True when the batch has all its groups; in deterministic mode not before everything under way is judged."""
        return len(self._with_signal) >= self.rule.num_groups and not (self.rule.deterministic and self._flying)

    @property
    def is_done(self) -> bool:
        """True when nothing more will be started and nothing is waited for."""
        return self.is_full or (not self._flying and self.num_wanted == 0)

    def start(self, positions: Iterable[int]) -> None:
        """Groups of these prompts are under way."""
        for position in positions:
            if position in self._flying or self._is_over(position):
                raise ValueError(f"the group of prompt {position} was started twice in one step")
            self._flying.add(position)
            self._num_used += 1

    def finish(self, position: int, *, has_signal: bool) -> None:
        """A group is answered and judged."""
        self._land(position)
        is_kept = has_signal or not self.rule.replaces_groups
        (self._with_signal if is_kept else self._without).add(position)

    def lose(self, position: int) -> None:
        """A group cannot be had (its media are unreadable, its judge failed for good); another prompt replaces it."""
        self._land(position)
        self._lost.add(position)

    def outcome(self) -> SamplingOutcome:
        """What to train, to abort and to carry over, once `is_done`."""
        if not self.is_done:
            raise ValueError(
                f"{len(self._with_signal)} of {self.rule.num_groups} groups are there, {len(self._flying)} under way "
                f"and {self.num_wanted} wanted; the step is not over"
            )
        taken = sorted(self._with_signal)
        accepted, surplus = taken[: self.rule.num_groups], taken[self.rule.num_groups :]
        num_missing = self.rule.num_groups - len(accepted)
        without = sorted(self._without)
        unneeded = tuple(sorted([*surplus, *self._flying]))
        is_dropped = self.rule.tail is Tail.DROP
        return SamplingOutcome(
            accepted=tuple(accepted),
            fillers=tuple(without[:num_missing]),
            rejected=tuple(without[num_missing:]),
            lost=tuple(sorted(self._lost)),
            dropped=unneeded if is_dropped else (),
            carried=() if is_dropped else unneeded,
            expected_signal_frac=self.signal_frac,
        )

    def _land(self, position: int) -> None:
        if position not in self._flying:
            raise ValueError(f"prompt {position} finished, but its group is not under way")
        self._flying.remove(position)

    def _is_over(self, position: int) -> bool:
        return position in self._with_signal or position in self._without or position in self._lost


def deal(positions: Iterable[int], *, num_controllers: int) -> list[list[int]]:
    """[controller] its share of prompts: position modulo controllers, so that a prompt's controller is known to all."""
    shares: list[list[int]] = [[] for _ in range(num_controllers)]
    for position in positions:
        shares[position % num_controllers].append(position)
    return shares
