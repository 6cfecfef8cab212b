"""Tests of the order of prompts, and of advantages, with numbers computed by hand and with properties."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yatt_mm.batching.prompt_order import PromptOrder
from yatt_mm.common.errors import DataError


def test_every_sample_is_drawn_once_an_epoch() -> None:
    order = PromptOrder(num_samples=10, seed=3)
    first = [slot.index for slot in order.take(10)]
    second = [slot.index for slot in order.take(10)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_another_seed_gives_another_order() -> None:
    orders = [[slot.index for slot in PromptOrder(num_samples=50, seed=seed).take(50)] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_the_state_does_not_grow_with_the_data_set() -> None:
    order = PromptOrder(num_samples=10**9, seed=0)
    order.take(5)
    assert len(json.dumps(order.state())) < 400


def test_quarantined_samples_are_left_out_and_positions_stay_gapless() -> None:
    order = PromptOrder(num_samples=4, seed=0)
    order.skipped = {1, 2}
    slots = order.take(6)
    assert {slot.index for slot in slots} == {0, 3}
    assert [slot.position for slot in slots] == list(range(6))
    assert [slot.epoch for slot in slots] == [0, 0, 1, 1, 2, 2]


def test_a_set_of_bad_samples_alone_is_an_error_not_a_hang() -> None:
    order = PromptOrder(num_samples=2, seed=0)
    order.skipped = {0, 1}
    with pytest.raises(DataError, match="all 2 training samples are quarantined"):
        order.take(1)


@given(before=st.integers(0, 40), after=st.integers(1, 40), seed=st.integers(0, 5))
def test_a_restored_order_goes_on_where_it_stopped(before: int, after: int, seed: int) -> None:
    order = PromptOrder(num_samples=7, seed=seed)
    order.take(before)
    restored = PromptOrder.from_state(order.state())
    assert restored.take(after) == order.take(after)


@given(before=st.integers(0, 40), count=st.integers(1, 40))
def test_what_is_peeked_at_is_what_is_drawn_next(before: int, count: int) -> None:
    order = PromptOrder(num_samples=7, seed=1)
    order.skipped = {3}
    order.take(before)
    state = order.state()
    coming = order.peek(count)
    assert order.state() == state
    assert order.take(count) == coming
