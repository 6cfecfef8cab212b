"""The placement policy: bounds, direction, convergence, no flapping, and what happens when a side runs dry."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yatt_mm.placement_policy import Bounds, Moment, Observation, RoleLoad, Split, decide, phase_s

WORK = st.floats(1.0, 1000.0)


def bounds_of(num_cells: int, least: int = 0, **changes: float) -> Bounds:
    most = num_cells - least
    return replace(Bounds(min_rollout=least, max_rollout=most, min_genrm=least, max_genrm=most), **changes)


def measured(split: Split, rollout_work_s: float, genrm_work_s: float) -> Observation:
    """What a phase of this work looks like at its end."""
    took_s = phase_s(split, rollout_work_s, genrm_work_s)
    return Observation(
        moment=Moment.STEP,
        rollout=RoleLoad(busy_frac=rollout_work_s / (split.rollout * took_s), held_s=split.rollout * took_s),
        genrm=RoleLoad(busy_frac=genrm_work_s / (split.genrm * took_s), held_s=split.genrm * took_s),
    )


def best_of(num_cells: int, rollout_work_s: float, genrm_work_s: float) -> Split:
    splits = [Split(rollout=r, genrm=num_cells - r) for r in range(1, num_cells)]
    return min(splits, key=lambda s: phase_s(s, rollout_work_s, genrm_work_s))


@given(a=WORK, b=WORK, num_cells=st.integers(2, 60), start=st.integers(1, 59))
def test_for_constant_work_it_comes_as_near_to_the_best_split_as_hysteresis_lets_it_and_stays(
    a: float, b: float, num_cells: int, start: int
) -> None:
    split = Split(rollout=min(start, num_cells - 1), genrm=num_cells - min(start, num_cells - 1))
    bounds = bounds_of(num_cells, 1)
    for _ in range(2):
        split = decide(split, measured(split, a, b), bounds).split
    lost_s = phase_s(split, a, b) - phase_s(best_of(num_cells, a, b), a, b)
    assert lost_s <= (bounds.min_gain_frac + 1e-9) * phase_s(split, a, b)
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
def test_noise_below_the_hysteresis_never_moves_a_cell(
    a: float, b: float, num_cells: int, noise: list[tuple[float, float]]
) -> None:
    split = best_of(num_cells, a, b)
    for factor_a, factor_b in noise:
        assert decide(split, measured(split, a * factor_a, b * factor_b), bounds_of(num_cells, 1)).split == split


LOADS = st.builds(
    RoleLoad,
    busy_frac=st.floats(0, 1),
    held_s=st.floats(0, 1000),
    num_running=st.integers(0, 500),
    num_waiting=st.integers(0, 500),
    num_coming=st.integers(0, 500),
    requests_per_cell=st.floats(0.5, 64),
    request_s=st.floats(0, 10),
    idle_s=st.floats(0, 100),
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


def load(running: int = 0, waiting: int = 0, coming: int = 0, idle_s: float = 0.0) -> RoleLoad:
    return RoleLoad(
        busy_frac=0.5,
        held_s=100.0,
        num_running=running,
        num_waiting=waiting,
        num_coming=coming,
        requests_per_cell=8,
        request_s=1.0,
        idle_s=idle_s,
    )


def test_two_cells_go_from_rollout_alone_over_one_each_to_the_judge_alone() -> None:
    bounds = bounds_of(2)
    split = Split(rollout=1, genrm=1)
    no_work_yet = inside(rollout=load(8, 40), genrm=load(0, 0, coming=48, idle_s=5.0))
    split = decide(split, no_work_yet, bounds).split
    assert split == Split(rollout=2, genrm=0)
    long_tail = inside(rollout=load(6), genrm=load(0, 42, coming=6))
    decision = decide(split, long_tail, bounds)
    assert decision.split == Split(rollout=1, genrm=1)
    assert "GenRM has 42 requests and 0 of 0 cells; rollout gives 1 back: 1+1" in decision.reason
    all_answered = inside(rollout=load(), genrm=load(8, 20))
    assert decide(decision.split, all_answered, bounds).split == Split(rollout=0, genrm=2)


def test_cells_that_will_be_wanted_again_are_lent_only_after_they_stood_idle_as_long_as_moving_costs() -> None:
    split = Split(rollout=1, genrm=1)
    just_idle = inside(rollout=load(8, 40), genrm=load(0, 0, coming=48, idle_s=1.0))
    assert decide(split, just_idle, bounds_of(2)).split == split


def test_lent_cells_come_back_as_far_as_waiting_requests_fill_them() -> None:
    lent = replace(inside(rollout=load(24, 40), genrm=load(8, 9)), planned=Split(rollout=1, genrm=3))
    assert decide(Split(rollout=3, genrm=1), lent, bounds_of(4)).split == Split(rollout=1, genrm=3)
    few = replace(inside(rollout=load(24, 40), genrm=load(8, 5)), planned=Split(rollout=1, genrm=3))
    crowded = replace(inside(rollout=load(24, 40), genrm=load(16, 0, coming=40)), planned=Split(rollout=1, genrm=3))
    assert decide(Split(rollout=3, genrm=1), crowded, bounds_of(4)).split == Split(rollout=2, genrm=2)
    assert decide(Split(rollout=3, genrm=1), few, bounds_of(4)).split == Split(rollout=2, genrm=2)


def test_a_role_whose_cells_are_full_gives_none_away() -> None:
    both_full = inside(rollout=load(16, 40), genrm=load(16, 400))
    assert decide(Split(rollout=2, genrm=2), both_full, bounds_of(4)).split == Split(rollout=2, genrm=2)


def test_a_move_that_costs_more_than_it_saves_is_not_made() -> None:
    split = Split(rollout=1, genrm=1)
    dear = inside(rollout=load(), genrm=load(8, 20), move_s=30.0)
    decision = decide(split, dear, bounds_of(2))
    assert decision.split == split
    assert "moving costs 30 s" in decision.reason


def test_bounds_that_no_split_fits_are_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="4 cells cannot be divided"):
        decide(
            Split(rollout=2, genrm=2),
            measured(Split(rollout=2, genrm=2), 1, 1),
            Bounds(min_rollout=3, max_rollout=4, min_genrm=3, max_genrm=4),
        )
