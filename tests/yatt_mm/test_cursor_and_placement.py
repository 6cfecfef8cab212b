"""The order of prompts, advantages, balance and placement: hand-worked numbers and properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yatt_mm.algorithms.advantages import group_advantages
from yatt_mm.control.cursor import PromptCursor
from yatt_mm.errors import ConfigError
from yatt_mm.placement import FULL_COLOCATION, Phase, Placement, Role, State, full_colocation
from yatt_mm.training.plan import SampleSize, balance, cost


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


sizes = st.lists(
    st.builds(
        SampleSize,
        position=st.integers(0, 9),
        row=st.integers(0, 7),
        num_tokens=st.integers(1, 50),
        num_sampled=st.integers(1, 5),
        num_patches=st.integers(0, 64),
    ),
    min_size=1,
    max_size=60,
    unique_by=lambda size: (size.position, size.row),
)


@given(samples=sizes, replicas=st.integers(1, 4), minibatches=st.integers(1, 3), cap=st.integers(50, 120))
def test_a_plan_trains_every_sample_once_under_the_cap(
    samples: list[SampleSize], replicas: int, minibatches: int, cap: int
) -> None:
    plan = balance(samples, num_replicas=replicas, num_minibatches=minibatches, max_tokens=cap)
    trained = [i for minibatch in plan for replica in minibatch for micro in replica for i in micro]
    assert sorted(trained) == list(range(len(samples)))
    for minibatch in plan:
        assert len({len(replica) for replica in minibatch}) == 1, "every replica has as many microbatches"
        for replica in minibatch:
            assert all(sum(samples[i].num_tokens for i in micro) <= cap for micro in replica)


@given(samples=sizes, replicas=st.integers(1, 4))
def test_no_replica_has_more_than_the_dearest_group_above_another(samples: list[SampleSize], replicas: int) -> None:
    plan = balance(samples, num_replicas=replicas, num_minibatches=1, max_tokens=10_000)
    groups: dict[int, list[SampleSize]] = {}
    for sample in samples:
        groups.setdefault(sample.position, []).append(sample)
    trained = [{samples[i].position for micro in replica for i in micro} for replica in plan[0]]
    loads = [sum(cost(groups[position]) for position in positions) for positions in trained]
    assert sum(len(positions) for positions in trained) == len(groups), "a group's samples stay together"
    assert max(loads) - min(loads) <= max(cost(group) for group in groups.values())


@given(samples=sizes)
def test_a_plan_does_not_depend_on_the_order_of_the_reports(samples: list[SampleSize]) -> None:
    def named(order: list[SampleSize]) -> list:
        plan = balance(order, num_replicas=2, num_minibatches=2, max_tokens=100)
        return [[[[(order[i].position, order[i].row) for i in m] for m in r] for r in b] for b in plan]

    assert named(samples) == named(samples[::-1])


def test_a_sample_longer_than_a_microbatch_is_named() -> None:
    sample = SampleSize(position=0, row=0, num_tokens=11, num_sampled=1, num_patches=0)
    with pytest.raises(ValueError, match=r"a sample has 11 tokens; train\.max_tokens_per_microbatch is 10"):
        balance([sample], num_replicas=1, num_minibatches=1, max_tokens=10)


def test_two_awake_roles_never_share_a_device() -> None:
    awake = {Phase.ROLLOUT: {Role.ROLLOUT: State.AWAKE, Role.TRAIN: State.AWAKE}}
    with pytest.raises(ValueError, match=r"both awake on device\(s\) \[1\]"):
        Placement(rollout=((1,),), train=((0,), (1,)), states=awake)
    Placement(rollout=((2,),), train=((0,), (1,)), states=awake)


def test_who_gives_memory_up_goes_first() -> None:
    placement = full_colocation(num_devices=2, num_engines=2)
    before = dict(FULL_COLOCATION[Phase.TRAIN])
    assert placement.transitions(before, Phase.ROLLOUT) == [
        (Role.TRAIN, State.ASLEEP),
        (Role.ROLLOUT, State.AWAKE),
    ]
    assert placement.transitions(dict(FULL_COLOCATION[Phase.ROLLOUT]), Phase.ROLLOUT) == []
