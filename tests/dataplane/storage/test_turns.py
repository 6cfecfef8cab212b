"""Tests of the turns of allocations that wait for room."""

import pytest

from dataplane.storage.turns import TURN_S, Turns

TICK_S = 0.1


def held_back(turns: Turns, since: float, until: float) -> float:
    """Return for how many seconds one that does not wait is held back, if it tries all the time."""
    other = object()
    ticks = range(round(since / TICK_S), round(until / TICK_S))
    return TICK_S * sum(turns.of_another(other, tick * TICK_S) > 0 for tick in ticks)


def test_one_that_is_never_served_holds_the_others_back_for_four_turns_in_a_minute() -> None:
    turns, never = Turns(), object()
    turns.enter(never, 0.0)
    by_time = [held_back(turns, since, until) for since, until in ((0, 2), (2, 8), (8, 18), (18, 36), (36, 68))]
    assert by_time == pytest.approx([0.0, *[TURN_S] * 4], abs=2 * TICK_S)
    assert held_back(Turns(), 0.0, 10.0) == 0.0


def test_a_turn_begins_after_its_length_and_is_its_holders_alone() -> None:
    turns, first, second = Turns(), object(), object()
    turns.enter(first, 10.0)
    turns.enter(first, 11.0)
    turns.enter(second, 10.5)
    assert turns.of_another(second, 10.0 + 0.99 * TURN_S) == 0.0
    now = 10.0 + TURN_S
    assert turns.of_another(second, now) == now + TURN_S
    assert turns.of_another(first, now) == 0.0
    assert turns.of_another(second, now + 0.99 * TURN_S) == now + TURN_S


def test_one_that_can_be_served_has_its_turn_although_an_older_one_never_can() -> None:
    turns, never, later = Turns(), object(), object()
    turns.enter(never, 0.0)
    held_back(turns, 0.0, 40.0)
    turns.enter(later, 40.0)
    first_turn = next(at for at in range(400, 600) if turns.of_another(never, at * TICK_S) > 0)
    assert first_turn * TICK_S <= 40.0 + 2 * TURN_S


def test_the_end_of_a_wait_ends_its_turn_and_the_next_in_line_has_its_own() -> None:
    turns, first, second = Turns(), object(), object()
    turns.enter(first, 0.0)
    turns.enter(second, 1.0)
    assert turns.of_another(second, TURN_S) > 0
    turns.leave(first)
    assert first not in turns and second in turns
    assert turns.of_another(second, TURN_S + 0.1) == 0.0
    assert turns.of_another(object(), TURN_S + 1.0) == 2 * TURN_S + 1.0
    turns.leave(second)
    assert turns.of_another(object(), 100.0) == 0.0


def test_of_two_whose_turn_is_due_the_one_that_has_waited_longer_for_it_is_the_next() -> None:
    turns, first, second = Turns(), object(), object()
    turns.enter(first, 0.0)
    assert turns.of_another(second, 2.0) == 4.0
    assert turns.of_another(second, 4.0) == 0.0, "its next turn is due at 8"
    turns.enter(second, 5.0)
    assert turns.of_another(first, 9.0) == 11.0 and turns.of_another(second, 9.0) == 0.0
