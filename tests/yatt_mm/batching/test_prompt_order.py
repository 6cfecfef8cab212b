"""Tests of the order of prompts, and of advantages, with numbers computed by hand and with properties."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.errors import BadRequestError
from dataplane.datasets.sampler import Source
from tests.yatt_mm.batching.orders import mixed_order, order_of
from yatt_mm.batching.prompt_order import PromptOrder
from yatt_mm.common.errors import DataError
from yatt_mm.protocol.control import Slot


def test_every_sample_is_drawn_once_an_epoch() -> None:
    order = order_of(10, seed=3)
    first = [slot.index for slot in order.take(10)]
    second = [slot.index for slot in order.take(10)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_another_seed_gives_another_order() -> None:
    orders = [[slot.index for slot in order_of(50, seed=seed).take(50)] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_the_state_does_not_grow_with_the_data_set() -> None:
    order = order_of(10**9, seed=0)
    order.take(5)
    assert len(json.dumps(order.state())) < 400


def test_quarantined_samples_are_left_out_and_positions_stay_gapless() -> None:
    order = order_of(4, seed=0)
    order.skipped["train"] = {1, 2}
    slots = order.take(6)
    assert {slot.index for slot in slots} == {0, 3}
    assert [slot.position for slot in slots] == list(range(6))
    assert [slot.epoch for slot in slots] == [0, 0, 1, 1, 2, 2]


def test_a_set_of_bad_samples_alone_is_an_error_not_a_hang() -> None:
    order = order_of(2, seed=0)
    order.skipped["train"] = {0, 1}
    with pytest.raises(DataError, match="all 2 training samples were left out"):
        order.take(1)


@given(before=st.integers(0, 40), after=st.integers(1, 40), seed=st.integers(0, 5))
def test_a_restored_order_goes_on_where_it_stopped(before: int, after: int, seed: int) -> None:
    order = order_of(7, seed=seed)
    order.take(before)
    restored = PromptOrder.from_state(order.state())
    assert restored.take(after) == order.take(after)


@given(before=st.integers(0, 40), count=st.integers(1, 40))
def test_what_is_peeked_at_is_what_is_drawn_next(before: int, count: int) -> None:
    order = order_of(7, seed=1)
    order.skipped["train"] = {3}
    order.take(before)
    state = order.state()
    coming = order.peek(count)
    assert order.state() == state
    assert order.take(count) == coming


WEIGHTS = {"a": 5.0, "b": 3.0, "c": 2.0}


def shares_of(slots: list[Slot]) -> dict[str, int]:
    return {name: sum(slot.set_name == name for slot in slots) for name in WEIGHTS}


def is_within_one(slots: list[Slot]) -> bool:
    return all(abs(count - len(slots) * WEIGHTS[name] / 10) < 1 for name, count in shares_of(slots).items())


def test_sets_are_mixed_by_their_weights_at_every_moment_and_each_has_its_epochs() -> None:
    order = mixed_order(WEIGHTS, num_samples=7)
    slots = order.take(200)
    assert all(is_within_one(slots[:count]) for count in range(201))
    assert [slot.position for slot in slots] == list(range(200))
    for name in WEIGHTS:
        of_set = [slot for slot in slots if slot.set_name == name]
        for epoch in range(len(of_set) // 7):
            assert sorted(slot.index for slot in of_set[7 * epoch : 7 * epoch + 7]) == list(range(7))
    first = {name: [slot.index for slot in slots if slot.set_name == name][:7] for name in WEIGHTS}
    assert len({tuple(indices) for indices in first.values()}) > 1, "each set has an order of its own"


@given(bad=st.sets(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=12), seed=st.integers(0, 3))
def test_samples_that_are_set_aside_take_nothing_from_the_share_of_their_set(
    bad: set[tuple[str, int]], seed: int
) -> None:
    order = mixed_order(WEIGHTS, num_samples=7, seed=seed)
    if any(sum(name == of for of, _ in bad) == 7 for name in WEIGHTS):
        return
    used: list[Slot] = []
    for _ in range(12):
        wanted = len(used) + 10
        while len(used) < wanted:
            for slot in order.take(wanted - len(used)):
                order.set_aside(slot) if (slot.set_name, slot.index) in bad else used.append(slot)
        assert is_within_one(used)
        order = PromptOrder.from_state(json.loads(json.dumps(order.state())))
    assert not bad & {(slot.set_name, slot.index) for slot in used}


def test_a_set_that_is_all_set_aside_is_named() -> None:
    order = mixed_order(WEIGHTS, num_samples=2)
    order.skipped["b"] = {0, 1}
    with pytest.raises(DataError, match=r"all 2 samples of the set b were left out; check data.train"):
        order.take(1)


def test_the_state_of_a_run_with_one_set_of_an_earlier_version_is_understood() -> None:
    order = order_of(9, seed=2)
    order.take(4)
    order.set_aside(order.take(1)[0])
    state = order.state()
    earlier = state | {"skipped": state["skipped"]["train"]}
    del earlier["sampler"]["sources"][0]["num_unused"]
    assert PromptOrder.from_state(earlier).take(20) == order.take(20)


def test_another_set_or_weight_cannot_go_on() -> None:
    state = mixed_order(WEIGHTS).state()
    same = [Source(dataset=name, num_samples=50, weight=weight) for name, weight in WEIGHTS.items()]
    assert PromptOrder.from_state(state, same).take(3) == mixed_order(WEIGHTS).take(3)
    with pytest.raises(BadRequestError, match=r"b \(50 samples, weight 3.0\).* now there is a .*weight 5.0\)"):
        PromptOrder.from_state(state, same[:1])
