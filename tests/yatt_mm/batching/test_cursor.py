"""Tests of the order of prompts, and of advantages, with numbers computed by hand and with properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yatt_mm.algorithms.advantages import group_advantages
from yatt_mm.batching.cursor import PromptCursor
from yatt_mm.common.errors import ConfigError


def test_every_sample_is_drawn_once_an_epoch() -> None:
    cursor = PromptCursor(num_samples=10, seed=3)
    first = [slot.index for slot in cursor.take(10)]
    second = [slot.index for slot in cursor.take(10)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_quarantined_samples_are_left_out_and_positions_stay_gapless() -> None:
    cursor = PromptCursor(num_samples=4, seed=0, skipped={1, 2})
    slots = cursor.take(6)
    assert {slot.index for slot in slots} == {0, 3}
    assert [slot.position for slot in slots] == list(range(6))
    assert [slot.epoch for slot in slots] == [0, 0, 1, 1, 2, 2]


def test_a_set_of_bad_samples_alone_is_an_error_not_a_hang() -> None:
    with pytest.raises(ConfigError, match="all 2 training samples are quarantined"):
        PromptCursor(num_samples=2, seed=0, skipped={0, 1}).take(1)


@given(before=st.integers(0, 40), after=st.integers(1, 40), seed=st.integers(0, 5))
def test_a_restored_cursor_goes_on_where_it_stopped(before: int, after: int, seed: int) -> None:
    cursor = PromptCursor(num_samples=7, seed=seed)
    cursor.take(before)
    restored = PromptCursor.from_state(cursor.state())
    assert restored.take(after) == cursor.take(after)


@given(before=st.integers(0, 40), count=st.integers(1, 40))
def test_what_is_peeked_at_is_what_is_drawn_next(before: int, count: int) -> None:
    cursor = PromptCursor(num_samples=7, seed=1, skipped={3})
    cursor.take(before)
    state = cursor.state()
    coming = cursor.peek(count)
    assert cursor.state() == state
    assert cursor.take(count) == coming


def test_advantages_are_the_hand_worked_ones() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx(
        [math.sqrt(3) / 2, -math.sqrt(3) / 2] * 1
        + [
            -math.sqrt(3) / 2,
            math.sqrt(3) / 2,
        ],
        abs=1e-5,
    )
    assert group_advantages([1.0, 0.0], normalize_std=False) == [0.5, -0.5]
    assert group_advantages([0.3, 0.3, 0.3]) == [0.0, 0.0, 0.0]
