"""Tests of the placement policy: bounds, direction, convergence, no flapping, and what happens if one role has no work
left."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yatt_mm.placement.policy import Bounds, Moment, Observation, RoleLoad, Split, decide, phase_s

WORK = st.floats(1.0, 1000.0)


def bounds_of(num_cells: int, least: int = 0, **changes: float) -> Bounds:
    most = num_cells - least
    return replace(Bounds(min_rollout=least, max_rollout=most, min_genrm=least, max_genrm=most), **changes)


def measured(split: Split, rollout_work_s: float, genrm_work_s: float) -> Observation:
    """Return the observation at the end of a phase with this work."""
    took_s = phase_s(split, rollout_work_s, genrm_work_s)
    return Observation(
        moment=Moment.STEP,
        rollout=RoleLoad(busy_frac=rollout_work_s / (split.rollout * took_s), held_s=split.rollout * took_s),
        genrm=RoleLoad(busy_frac=genrm_work_s / (split.genrm * took_s), held_s=split.genrm * took_s),
    )


def helped_s(split: Split, rollout_work_s: float, genrm_work_s: float) -> float:
    """Return the seconds of a phase in which, once all responses are sampled, all cells except one do judging, and
    moving costs nothing."""
    rollout_s = rollout_work_s / split.rollout
    return rollout_s + max(0.0, genrm_work_s - split.genrm * rollout_s) / (split.num_cells - 1)


def settled(split: Split, rollout_work_s: float, genrm_work_s: float) -> Split:
    """Return the split after two steps of this work."""
    for _ in range(2):
        observation = measured(split, rollout_work_s, genrm_work_s)
        split = decide(split, observation, bounds_of(split.num_cells, 1)).split
    return split


@given(a=WORK, b=WORK, num_cells=st.integers(2, 60), start=st.integers(1, 59))
def test_for_constant_work_it_comes_as_near_to_the_best_split_as_hysteresis_lets_it_and_stays(
    a: float, b: float, num_cells: int, start: int
) -> None:
    begun = Split(rollout=min(start, num_cells - 1), genrm=num_cells - min(start, num_cells - 1))
    split, bounds = settled(begun, a, b), bounds_of(num_cells, 1)
    best_s = min(helped_s(Split(rollout=r, genrm=num_cells - r), a, b) for r in range(1, num_cells))
    assert best_s >= (1 - bounds.min_gain_frac - 1e-9) * helped_s(split, a, b)
    assert decide(split, measured(split, a, b), bounds).split == split


@given(a=WORK, b=WORK, num_cells=st.integers(2, 60), rollout=st.integers(1, 59))
def test_cells_only_ever_move_toward_the_bottleneck(a: float, b: float, num_cells: int, rollout: int) -> None:
    split = Split(rollout=min(rollout, num_cells - 1), genrm=num_cells - min(rollout, num_cells - 1))
    new = decide(split, measured(split, a, b), bounds_of(num_cells, 1)).split
    assert new.num_cells == num_cells
    if new != split:
        assert (new.rollout > split.rollout) == (a / split.rollout > b / split.genrm)


@given(
    a=WORK,
    b=WORK,
    num_cells=st.integers(2, 60),
    noise=st.lists(st.tuples(st.floats(0.99, 1.01), st.floats(0.99, 1.01)), min_size=1, max_size=20),
)
def test_noise_below_the_hysteresis_does_not_move_cells_there_and_back(
    a: float, b: float, num_cells: int, noise: list[tuple[float, float]]
) -> None:
    splits = [settled(Split(rollout=1, genrm=num_cells - 1), a, b)]
    for factor_a, factor_b in noise:
        observation = measured(splits[-1], a * factor_a, b * factor_b)
        splits.append(decide(splits[-1], observation, bounds_of(num_cells, 1)).split)
    assert sum(before != after for before, after in itertools.pairwise(splits)) <= 1, "between two that are as good"
    assert max(split.rollout for split in splits) - min(split.rollout for split in splits) <= 1


LOADS = st.builds(
    RoleLoad,
    busy_frac=st.floats(0, 1),
    held_s=st.floats(0, 1000),
    num_running=st.integers(0, 500),
    num_waiting=st.integers(0, 500),
    requests_per_cell=st.floats(0.5, 64),
    request_s=st.floats(0, 10),
)


@given(
    rollout=LOADS,
    genrm=LOADS,
    moment=st.sampled_from(Moment),
    move_s=st.floats(0, 30),
    cells=st.tuples(st.integers(0, 16), st.integers(0, 16)),
    least=st.integers(0, 2),
)
def test_whatever_is_observed_the_split_stays_within_the_bounds_and_the_answer_is_the_same_twice(
    rollout: RoleLoad, genrm: RoleLoad, moment: Moment, move_s: float, cells: tuple[int, int], least: int
) -> None:
    split = Split(rollout=cells[0], genrm=cells[1])
    if split.num_cells < 2 * least or split.num_cells == 0:
        return
    observation = Observation(moment=moment, rollout=rollout, genrm=genrm, move_s=move_s)
    bounds = bounds_of(split.num_cells, least)
    decision = decide(split, observation, bounds)
    assert bounds.allows(decision.split) and decision.split.num_cells == split.num_cells
    assert str(decision.split) in decision.reason
    assert decide(split, observation, bounds) == decision


def inside(*, rollout: RoleLoad, genrm: RoleLoad, move_s: float = 2.0) -> Observation:
    return Observation(moment=Moment.GENERATION, rollout=rollout, genrm=genrm, move_s=move_s)


def load(running: int = 0, waiting: int = 0, request_s: float = 1.0) -> RoleLoad:
    return RoleLoad(
        busy_frac=0.5,
        held_s=100.0,
        num_running=running,
        num_waiting=waiting,
        requests_per_cell=8,
        request_s=request_s,
    )


def test_two_cells_go_from_rollout_alone_over_one_each_to_the_judge_alone() -> None:
    bounds, split = bounds_of(2), Split(rollout=1, genrm=1)
    begun = inside(rollout=load(8, 40), genrm=load(), move_s=2.0)
    assert decide(split, begun, bounds).split == split, "who knows when there will be something to judge"
    soon = replace(begun, genrm_lead_s=5.9)
    assert decide(split, soon, bounds).split == split, "moving there and back takes four of six seconds"
    decision = decide(split, replace(begun, genrm_lead_s=6.1), bounds)
    assert decision.split == Split(rollout=2, genrm=0)
    assert "GenRM has nothing to do for 6.1 s, as in the last phase; rollout has 40 waiting: 2+0" in decision.reason
    answered = replace(inside(rollout=load(16, 31), genrm=load(0, 1)), planned=split)
    assert decide(decision.split, answered, bounds).split == split
    long_tail = inside(rollout=load(1), genrm=load(8, 40))
    assert decide(split, long_tail, bounds).split == split, "a rollout is left, and keeps a cell"
    all_answered = inside(rollout=load(), genrm=load(8, 20))
    assert decide(split, all_answered, bounds).split == Split(rollout=0, genrm=2)


def test_a_judge_without_a_cell_gets_one_as_soon_as_it_has_a_request() -> None:
    decision = decide(Split(rollout=2, genrm=0), inside(rollout=load(16, 30), genrm=load(0, 3)), bounds_of(2))
    assert decision.split == Split(rollout=1, genrm=1)
    assert "GenRM has 3 requests and 0 of 0 cells; rollout gives it 1: 1+1" in decision.reason


def test_a_role_with_requests_keeps_its_last_cell() -> None:
    """Test that a role with requests keeps its last cell. If there is only one cell, the roles take turns and do not
    take it from each other at every decision."""
    for split in (Split(rollout=1, genrm=0), Split(rollout=0, genrm=1)):
        both = inside(rollout=load(3, 30), genrm=load(3, 30), move_s=0.1)
        assert decide(split, both, bounds_of(1)).split == split
    done = inside(rollout=load(), genrm=load(0, 30))
    assert decide(Split(rollout=1, genrm=0), done, bounds_of(1)).split == Split(rollout=0, genrm=1)
    new_prompts = inside(rollout=load(0, 8), genrm=load())
    assert decide(Split(rollout=0, genrm=1), new_prompts, bounds_of(1)).split == Split(rollout=1, genrm=0)


def test_lent_cells_come_back_as_far_as_waiting_requests_fill_them() -> None:
    split, planned = Split(rollout=1, genrm=3), Split(rollout=3, genrm=1)
    many = replace(inside(rollout=load(8, 20), genrm=load(24, 40)), planned=planned)
    assert decide(split, many, bounds_of(4)).split == planned
    few = replace(inside(rollout=load(8, 5), genrm=load(24, 40)), planned=planned)
    assert decide(split, few, bounds_of(4)).split == Split(rollout=2, genrm=2)


def test_rollouts_are_crowded_on_fewer_cells_only_for_more_than_that_may_cost() -> None:
    """Two cells need 16 s for 32 verdicts of 1 s. With a third, this is 11.3 s; but rollouts may then take 2.7 s
    longer. A cell moves only if more is gained."""
    split, bounds = Split(rollout=2, genrm=2), bounds_of(4)
    crowded = inside(rollout=load(8), genrm=load(16, 16), move_s=2.0)
    assert decide(split, crowded, bounds).split == split
    assert "crowded rollouts" in decide(split, crowded, bounds).reason
    assert decide(split, crowded, bounds).refused == Split(rollout=1, genrm=3)
    idle = inside(rollout=load(), genrm=load(16, 8), move_s=2.0)
    assert decide(split, idle, bounds).split == Split(rollout=1, genrm=3), "an idle cell costs the move alone"
    cheap = inside(rollout=load(8), genrm=load(16, 16), move_s=0.5)
    assert decide(split, cheap, bounds).split == Split(rollout=1, genrm=3)


def test_a_role_whose_cells_are_full_gives_none_away() -> None:
    both_full = inside(rollout=load(16, 40), genrm=load(16, 400))
    assert decide(Split(rollout=2, genrm=2), both_full, bounds_of(4)).split == Split(rollout=2, genrm=2)


def test_a_move_that_costs_more_than_it_saves_is_not_made() -> None:
    split = Split(rollout=1, genrm=1)
    slow_move = inside(rollout=load(), genrm=load(8, 20), move_s=30.0)
    decision = decide(split, slow_move, bounds_of(2))
    assert decision.split == split
    assert "moving costs 30 s" in decision.reason


def test_bounds_that_no_split_fits_are_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="4 cells cannot be divided"):
        decide(
            Split(rollout=2, genrm=2),
            measured(Split(rollout=2, genrm=2), 1, 1),
            Bounds(min_rollout=3, max_rollout=4, min_genrm=3, max_genrm=4),
        )
