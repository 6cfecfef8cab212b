"""Dynamic sampling: which groups make up a step's batch, and what happens to the long tail of slow groups. Pure state.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group whose rewards are all equal teaches nothing. Another
prompt's group replaces it, until the batch is full or a bound is reached. Over-dispatch keeps more groups in flight
than the batch still needs, so that the batch fills without waiting for the slowest group. Groups that are still in
flight then are cut off.

A step is one `StepSampling`. Its owner (the rendezvous in a run, the event loop in the simulator) repeats:

    while not step.is_done:
        step.start(draw(step.num_wanted))     # deal `num_wanted` further prompts out to the controllers
        step.finish(position, has_signal)     # when a group is judged; `lose` when it has failed
    outcome = step.outcome()                  # train, abort and carry these

It sees positions and one bit per group, so its cost does not depend on the number of controllers. A group's position is
its place in the run's one order of prompts. In deterministic mode new prompts are asked for only when nothing is in
flight, and groups are taken in the order of their positions. Then the batch depends neither on which group finishes
first nor on the number of controllers. No I/O, no clock, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

PRIOR_WEIGHT = 8.0
"""The weight of the expected share of signal, in groups, next to the groups seen in this step."""
MIN_SIGNAL_FRAC = 0.05
"""The least assumed share of groups with signal. It bounds how many prompts one refill asks for."""


class Tail(StrEnum):
    """What happens to the tail: the groups that are still being sampled when the batch is full."""

    DROP = "drop"
    """They are aborted. Their prompts come again in the next epoch."""
    RESTART = "restart"
    """They are aborted. Their prompts are the first of the next step, and the new policy samples new responses."""
    CONTINUE = "continue"
    """They are aborted with the tokens that they have. The next step continues them and keeps every token's policy
    version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRule:
    """The part of dynamic sampling that the config decides."""

    num_groups: int
    """The number of groups in a full batch."""
    replaces_groups: bool = False
    """True replaces groups without signal (DAPO); False takes every group."""
    max_prompts: int
    """The most prompts that a step may use, carried-over ones included."""
    over_dispatch: float = 1.0
    """The number of groups in flight per group that is still missing; 1 waits for the slowest."""
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
    """How a step's batch was filled. Every used prompt is in exactly one of the tuples, in the order of prompts."""

    accepted: tuple[int, ...]
    """The groups to train on."""
    fillers: tuple[int, ...]
    """The groups without signal that keep the batch at its size when the bound was reached; their advantages are 0."""
    rejected: tuple[int, ...]
    """The groups without signal that were replaced."""
    lost: tuple[int, ...]
    """The groups that failed."""
    dropped: tuple[int, ...]
    """The groups that were not needed any more and whose prompts are not carried over."""
    carried: tuple[int, ...]
    """The groups with which the next step begins."""
    expected_signal_frac: float
    """The share of groups with signal that the next step should expect, from 0 to 1."""

    @property
    def num_prompts_used(self) -> int:
        """The number of prompts that the step drew or got from the last step."""
        parts = (self.accepted, self.fillers, self.rejected, self.lost, self.dropped, self.carried)
        return sum(len(part) for part in parts)


class StepSampling:
    """The batch of one step while it is being filled."""

    def __init__(self, rule: SamplingRule, *, carried: Iterable[int] = (), expected_signal_frac: float = 1.0) -> None:
        """`carried` and `expected_signal_frac` come from the last step's outcome. The carried groups are in flight from
        the beginning."""
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
        """The number of prompts to start now; 0 when enough are in flight, or when `num_used` has
        reached `rule.max_prompts`."""
        if self.is_full or (self.rule.deterministic and self._flying):
            return 0
        missing = self.rule.num_groups - len(self._with_signal)
        factor = 1.0 if self.rule.deterministic else self.rule.over_dispatch
        goal = math.ceil(factor * missing / max(self.signal_frac, MIN_SIGNAL_FRAC))
        return max(0, min(goal - len(self._flying), self.rule.max_prompts - self._num_used))

    @property
    def signal_frac(self) -> float:
        """The expected share of groups with signal, from those judged in this step and the expectation before."""
        num_judged = len(self._with_signal) + len(self._without)
        return (len(self._with_signal) + PRIOR_WEIGHT * self._prior) / (num_judged + PRIOR_WEIGHT)

    @property
    def num_used(self) -> int:
        """The number of prompts of this step so far, with those that `spend` added; `rule.max_prompts` is its limit."""
        return self._num_used

    def spend(self, count: int) -> None:
        """Count `count` more prompts as used in this step: an earlier stream of the step began them and cut them
        off."""
        self._num_used += count

    @property
    def num_flying(self) -> int:
        """The number of groups in flight."""
        return len(self._flying)

    @property
    def is_full(self) -> bool:
        """True when the batch has all its groups. In deterministic mode all groups in flight must be judged before
        that."""
        return len(self._with_signal) >= self.rule.num_groups and not (self.rule.deterministic and self._flying)

    @property
    def is_done(self) -> bool:
        """True when no group will be started and no group is waited for."""
        return self.is_full or (not self._flying and self.num_wanted == 0)

    def start(self, positions: Iterable[int]) -> None:
        """Note that the groups of these prompts are in flight."""
        for position in positions:
            if position in self._flying or self._is_over(position):
                raise ValueError(f"the group of prompt {position} was started twice in one step")
            self._flying.add(position)
            self._num_used += 1

    def finish(self, position: int, *, has_signal: bool) -> None:
        """Note that a group has its responses and is judged."""
        self._land(position)
        is_kept = has_signal or not self.rule.replaces_groups
        (self._with_signal if is_kept else self._without).add(position)

    def lose(self, position: int) -> None:
        """Note that a group failed (its media cannot be decoded, or its judge failed for good). Another prompt replaces
        it."""
        self._land(position)
        self._lost.add(position)

    def outcome(self) -> SamplingOutcome:
        """Return what to train, to abort and to carry over, once `is_done`."""
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
    """Return for each controller its share of prompts: position modulo controllers, so that every process knows a
    prompt's controller."""
    shares: list[list[int]] = [[] for _ in range(num_controllers)]
    for position in positions:
        shares[position % num_controllers].append(position)
    return shares
