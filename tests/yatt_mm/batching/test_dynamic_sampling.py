"""Tests of dynamic sampling: full batches, bounds, nothing lost, and an order that does not depend on races."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yatt_mm.batching.dynamic_sampling import SamplingOutcome, SamplingRule, StepSampling, Tail, deal


class Prompts:
    """The order of prompts of a run. About every second prompt has signal."""

    def __init__(self, signal_frac: float, seed: int) -> None:
        self.next = 0
        self._signal_frac, self._seed = signal_frac, seed

    def draw(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def has_signal(self, position: int) -> bool:
        return random.Random(f"{self._seed} {position}").random() < self._signal_frac


def run_step(step: StepSampling, prompts: Prompts, race: random.Random) -> tuple[SamplingOutcome, list[int]]:
    """Run one step in which groups finish in an order that `race` decides. Return the outcome and the prompts in the
    order in which they were drawn."""
    drawn: list[int] = []
    flying = sorted(step._flying)
    while not step.is_done:
        new = prompts.draw(step.num_wanted)
        step.start(new)
        drawn += new
        flying += new
        position = flying.pop(race.randrange(len(flying)))
        step.finish(position, has_signal=prompts.has_signal(position))
    return step.outcome(), drawn


def test_half_of_the_prompts_without_signal_still_give_full_batches() -> None:
    rule = SamplingRule(num_groups=16, max_prompts=160, replaces_groups=True)
    prompts, expected = Prompts(0.5, seed=1), 1.0
    for step in range(5):
        outcome, _ = run_step(StepSampling(rule, expected_signal_frac=expected), prompts, random.Random(step))
        expected = outcome.expected_signal_frac
        assert len(outcome.accepted) == 16 and not outcome.fillers
        assert all(prompts.has_signal(position) for position in outcome.accepted)
    assert 0.3 < expected < 0.7


@given(
    num_groups=st.integers(1, 12),
    spare=st.integers(0, 30),
    signal_frac=st.floats(0, 1),
    over_dispatch=st.floats(1, 3),
    tail=st.sampled_from(Tail),
    deterministic=st.booleans(),
    replaces=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_prompt_ends_in_one_place_and_the_bound_holds(
    num_groups: int,
    spare: int,
    signal_frac: float,
    over_dispatch: float,
    tail: Tail,
    deterministic: bool,
    replaces: bool,
    seed: int,
) -> None:
    rule = SamplingRule(
        num_groups=num_groups,
        max_prompts=num_groups + spare,
        replaces_groups=replaces,
        over_dispatch=over_dispatch,
        tail=tail,
        deterministic=deterministic,
    )
    prompts, carried = Prompts(signal_frac, seed), ()
    for step in range(3):
        sampling = StepSampling(rule, carried=carried)
        outcome, drawn = run_step(sampling, prompts, random.Random(seed + step))
        ended = [
            *outcome.accepted,
            *outcome.fillers,
            *outcome.rejected,
            *outcome.lost,
            *outcome.dropped,
            *outcome.carried,
        ]
        assert sorted(ended) == sorted([*carried, *drawn])
        assert outcome.num_prompts_used == len(ended) <= rule.max_prompts
        assert len(outcome.accepted) <= num_groups
        if outcome.num_prompts_used < rule.max_prompts:
            assert len(outcome.accepted) == num_groups
        assert not (outcome.carried if tail is Tail.DROP else outcome.dropped)
        carried = outcome.carried


@given(seed=st.integers(0, 50), race=st.integers(0, 50), num_controllers=st.sampled_from([1, 2, 4]))
def test_in_deterministic_mode_no_race_and_no_number_of_controllers_changes_the_batch(
    seed: int, race: int, num_controllers: int
) -> None:
    rule = SamplingRule(
        num_groups=8, max_prompts=80, replaces_groups=True, deterministic=True, tail=Tail.CONTINUE, over_dispatch=2.0
    )

    def batches(race: random.Random) -> list[tuple[SamplingOutcome, list[int]]]:
        prompts, carried, expected, results = Prompts(0.5, seed), (), 1.0, []
        for _ in range(3):
            step = StepSampling(rule, carried=carried, expected_signal_frac=expected)
            outcome, drawn = run_step(step, prompts, race)
            carried, expected = outcome.carried, outcome.expected_signal_frac
            results.append((outcome, drawn))
        return results

    reference = batches(random.Random(0))
    assert batches(random.Random(race)) == reference
    shares = deal(reference[0][1], num_controllers=num_controllers)
    assert sorted(position for share in shares for position in share) == reference[0][1]


def test_over_dispatch_ends_the_step_without_the_slowest_groups_which_the_next_step_begins_with() -> None:
    rule = SamplingRule(num_groups=4, max_prompts=100, over_dispatch=1.5, tail=Tail.CONTINUE)
    step = StepSampling(rule)
    assert step.num_wanted == 6
    step.start(range(6))
    for position in (5, 1, 0, 3):
        step.finish(position, has_signal=False)
    outcome = step.outcome()
    assert outcome.accepted == (0, 1, 3, 5)
    assert outcome.carried == (2, 4)
    following = StepSampling(rule, carried=outcome.carried)
    assert following.num_flying == 2 and following.num_wanted == 4


def test_at_the_bound_groups_without_signal_fill_the_batch() -> None:
    step = StepSampling(SamplingRule(num_groups=2, max_prompts=3, replaces_groups=True))
    step.start(range(2))
    step.finish(0, has_signal=False)
    step.finish(1, has_signal=True)
    assert step.num_wanted == 1
    step.start([2])
    assert step.num_wanted == 0 and not step.is_done
    step.finish(2, has_signal=False)
    outcome = step.outcome()
    assert (outcome.accepted, outcome.fillers, outcome.rejected) == ((1,), (0,), (2,))


def test_a_group_that_is_lost_is_replaced() -> None:
    step = StepSampling(SamplingRule(num_groups=1, max_prompts=2))
    step.start([7])
    step.lose(7)
    assert step.num_wanted == 1


def test_a_group_that_was_never_started_cannot_finish() -> None:
    with pytest.raises(ValueError, match="prompt 3 finished, but its group is not under way"):
        StepSampling(SamplingRule(num_groups=1, max_prompts=1)).finish(3, has_signal=True)


def test_a_bound_below_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="max_prompts is 3, fewer than the batch's 4 groups"):
        SamplingRule(num_groups=4, max_prompts=3)
