"""Tests of filling a step's batch: in rounds (the same prompts for any number of controllers), in streams, and in
turns."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable

import pytest

from tests.yatt_mm.batching.orders import mixed_order, order_of
from yatt_mm.batching.dynamic_sampling import SamplingRule, Tail
from yatt_mm.batching.step_batches import RoundOutcome, StepBatches
from yatt_mm.common.errors import CheckpointError
from yatt_mm.protocol.control import Slot

RULE = SamplingRule(num_groups=8, replaces_groups=True, max_prompts=32)


def batches(rule: SamplingRule = RULE, num_samples: int = 100) -> StepBatches:
    return StepBatches(rule, order_of(num_samples, seed=3))


def has_signal(slot: Slot) -> bool:
    """Return True for the half of the prompts whose groups have signal."""
    return slot.index % 2 == 0


def fill(
    batches: StepBatches, num_controllers: int, bad: frozenset[int] = frozenset()
) -> tuple[RoundOutcome, list[Slot]]:
    """Fill the batch of one step, as controllers do, with arrivals in random order. Return the slots that were used."""
    used: list[Slot] = []
    while True:
        shares: list[list[Slot]] = [[] for _ in range(num_controllers)]
        faults: list[list[int]] = [[] for _ in range(num_controllers)]
        while True:
            for share, dealt in zip(shares, batches.deal(faults)):
                share += dealt
            faults = [[slot.position for slot in share if slot.index in bad] for share in shares]
            shares = [[slot for slot in share if slot.index not in bad] for share in shares]
            if not any(faults):
                break
        for share in shares:
            random.shuffle(share)
            used += share
        outcome = batches.finish_round([[(slot.position, has_signal(slot)) for slot in share] for share in shares])
        if outcome.is_full:
            return outcome, sorted(used, key=lambda slot: slot.position)


@pytest.mark.parametrize("num_controllers", [2, 4, 7])
def test_any_number_of_controllers_uses_the_same_prompts_in_the_same_order(num_controllers: int) -> None:
    one, many = batches(), batches()
    for _ in range(5):
        assert fill(one, 1) == fill(many, num_controllers)


def test_mixed_sets_are_the_same_for_any_number_of_controllers_also_after_a_resume() -> None:
    weights, bad = {"a": 5.0, "b": 3.0, "c": 2.0}, frozenset({3, 8})
    rule = SamplingRule(num_groups=10, max_prompts=10)
    straight = StepBatches(rule, mixed_order(weights, num_samples=12))
    other = StepBatches(rule, mixed_order(weights, num_samples=12))
    seen: list[Slot] = []
    for step in range(8):
        used = fill(straight, 1, bad)[1]
        assert fill(other, 1 + step % 4, bad)[1] == used
        seen += used
        for name, weight in weights.items():
            assert abs(sum(slot.set_name == name for slot in seen) - weight * (step + 1)) < 1
        other = StepBatches.from_state(rule, json.loads(json.dumps(other.state())))


def test_the_batch_is_full_of_groups_with_signal() -> None:
    filling = batches()
    for _ in range(5):
        outcome, used = fill(filling, 2)
        by_position = {slot.position: slot for slot in used}
        assert len(outcome.kept) == 8
        assert all(has_signal(by_position[position]) for position in outcome.kept)
        assert outcome.num_prompts_used == len(used)
        with_signal = [slot.position for slot in used if has_signal(slot)]
        assert list(outcome.kept) == with_signal[:8], "the first ones in the run's order count"


def test_a_set_without_any_signal_ends_at_the_bound_with_a_batch_of_its_size() -> None:
    filling = StepBatches(RULE, order_of(100, seed=3))
    while True:
        shares = filling.deal([[], []])
        outcome = filling.finish_round([[(slot.position, False) for slot in share] for share in shares])
        if outcome.is_full:
            break
    assert (len(outcome.kept), outcome.num_prompts_used, outcome.num_rejected) == (8, 32, 24)


def test_prompts_with_bad_media_are_replaced_within_their_round_and_never_drawn_again() -> None:
    bad = frozenset(range(0, 100, 5))
    filling = batches()
    for _ in range(12):  # more than one epoch
        outcome, used = fill(filling, 3, bad)
        assert len(outcome.kept) == 8
        assert not bad & {slot.index for slot in used}


def test_a_round_in_which_every_prompt_is_bad_is_dealt_again() -> None:
    filling = batches(SamplingRule(num_groups=2, max_prompts=2))
    first = [slot for share in filling.deal([[], []]) for slot in share]
    again = [slot for share in filling.deal([[slot.position] for slot in first]) for slot in share]
    assert len(again) == 2
    assert not {slot.index for slot in first} & {slot.index for slot in again}


def test_without_replacement_a_step_takes_what_it_draws() -> None:
    plain = batches(SamplingRule(num_groups=8, max_prompts=8))
    outcome, used = fill(plain, 3)
    assert outcome.kept == tuple(range(8)) == tuple(slot.position for slot in used)


def test_a_checkpoint_continues_with_the_same_prompts() -> None:
    straight = batches()
    fill(straight, 2)
    resumed = StepBatches.from_state(RULE, json.loads(json.dumps(straight.state())))
    for _ in range(3):
        assert fill(resumed, 1) == fill(straight, 2)


class Stream:
    """One step of a stream, as controllers run it, with arrivals in random order."""

    def __init__(self, batches: StepBatches, num_controllers: int) -> None:
        self.batches = batches
        self.flying = [(c, slot) for c, share in enumerate(batches.open(num_controllers)) for slot in share]
        self.begun = {slot.position: (c, slot) for c, slot in self.flying}

    def land(self, controller: int, slot: Slot, signal: bool | None) -> None:
        self.flying.remove((controller, slot))
        more = [(controller, new) for new in self.batches.land(controller, slot.position, signal)]
        self.flying += more
        self.begun.update({new.position: (controller, new) for _, new in more})

    def fill(self, bad: frozenset[int] = frozenset()) -> RoundOutcome:
        while self.batches.outcome is None:
            controller, slot = random.choice(self.flying)
            self.land(controller, slot, None if slot.index in bad else has_signal(slot))
        return self.batches.outcome


STREAM = SamplingRule(num_groups=8, replaces_groups=True, max_prompts=64, over_dispatch=1.5, tail=Tail.CONTINUE)


def test_a_stream_fills_the_batch_with_groups_with_signal_and_uses_every_prompt_once() -> None:
    filling = batches(STREAM)
    used: list[int] = []
    for _ in range(6):
        stream = Stream(filling, 3)
        outcome = stream.fill()
        assert len(outcome.kept) == 8
        assert all(has_signal(stream.begun[position][1]) for position in outcome.kept)
        used += [position for position in stream.begun if position not in outcome.carried]
    assert sorted(used) == sorted(set(used)), "what was carried over is used up once"


def test_what_a_stream_carries_over_begins_the_next_one_with_its_controller() -> None:
    filling = batches(STREAM)
    stream = Stream(filling, 3)
    outcome = stream.fill()
    assert outcome.carried, "more were under way than the batch had room for"
    following = Stream(filling, 3)
    for position in outcome.carried:
        assert following.begun[position] == stream.begun[position]


def test_prompts_that_were_carried_over_survive_a_checkpoint() -> None:
    filling = batches(STREAM)
    outcome = Stream(filling, 3).fill()
    state = json.loads(json.dumps(filling.state()))
    restored = Stream(StepBatches.from_state(STREAM, state), 2)
    assert set(outcome.carried) <= set(restored.begun)


class Turns:
    """Steps in turns with a judge: a stream of prompts is sampled, then judged, until the batch is full."""

    def __init__(self, batches: StepBatches, num_controllers: int) -> None:
        self.batches = batches
        self.num_controllers = num_controllers
        self.begun: dict[int, Slot] = {}
        self.num_rounds = 0

    def fill(self, bad: frozenset[int] = frozenset(), judge: Callable[[Slot], bool] = has_signal) -> RoundOutcome:
        for self.num_rounds in range(1, 100):
            stream = Stream(self.batches, self.num_controllers)
            answered = stream.fill(bad)
            assert answered.is_full
            self.begun |= {position: slot for position, (_, slot) in stream.begun.items()}
            landed: list[list[tuple[int, bool]]] = [[] for _ in range(self.num_controllers)]
            for position in answered.kept:
                controller, slot = stream.begun[position]
                landed[controller].append((position, judge(slot)))
            outcome = self.batches.finish_round(landed)
            if outcome.is_full:
                return outcome
        raise AssertionError("the batch never fills")


def turns(rule: SamplingRule = STREAM) -> StepBatches:
    return StepBatches(rule, order_of(100, seed=3), in_turns=True)


@pytest.mark.parametrize("tail", Tail)
def test_in_turns_the_batch_is_full_of_groups_with_signal_and_no_prompt_counts_twice(tail: Tail) -> None:
    filling = turns(dataclasses.replace(STREAM, tail=tail))
    kept: list[int] = []
    for _ in range(6):
        steps = Turns(filling, 3)
        outcome = steps.fill()
        assert len(outcome.kept) == 8
        assert all(has_signal(steps.begun[position]) for position in outcome.kept)
        assert outcome.num_prompts_used == len(steps.begun)
        assert bool(outcome.carried) == (tail is not Tail.DROP)
        assert not set(outcome.carried) & set(outcome.kept)
        kept += outcome.kept
    assert len(kept) == len(set(kept))


def test_in_turns_a_round_ends_when_as_many_are_answered_as_the_batch_lacks() -> None:
    filling = turns(dataclasses.replace(STREAM, replaces_groups=False))
    stream = Stream(filling, 2)
    assert len(stream.flying) == 12, "half as many again are under way"
    answered = stream.fill()
    assert (len(answered.kept), len(answered.carried)) == (8, 4)
    outcome = filling.finish_round([[(position, False) for position in answered.kept], []])
    assert (outcome.is_full, len(outcome.kept), outcome.num_prompts_used) == (True, 8, 12)
    assert set(outcome.carried) == set(answered.carried) <= set(Stream(filling, 2).begun)


@pytest.mark.parametrize("tail", Tail)
def test_in_turns_what_is_cut_off_counts_toward_the_bound(tail: Tail) -> None:
    filling = turns(dataclasses.replace(STREAM, max_prompts=30, tail=tail))
    for _ in range(4):
        steps = Turns(filling, 2)
        outcome = steps.fill(judge=lambda slot: False)
        assert len(outcome.kept) == 8, "filled up with groups without signal"
        assert outcome.num_prompts_used == len(steps.begun) <= 30


def test_what_a_stream_carried_over_comes_first_in_a_run_that_goes_on_in_rounds() -> None:
    filling = turns()
    outcome = Turns(filling, 2).fill()
    assert outcome.carried
    rounds = StepBatches.from_state(
        dataclasses.replace(RULE, deterministic=True), json.loads(json.dumps(filling.state()))
    )
    _, used = fill(rounds, 3)
    assert set(outcome.carried) <= {slot.position for slot in used}
    assert rounds.state()["carried"] == []


def test_in_turns_bad_media_are_replaced_while_others_are_answered() -> None:
    bad = frozenset(range(0, 100, 4))
    filling = turns()
    for _ in range(8):
        steps = Turns(filling, 2)
        assert len(steps.fill(bad).kept) == 8
    assert filling.order.skipped["train"] and filling.order.skipped["train"] <= bad


def test_what_lands_after_the_batch_is_full_changes_nothing() -> None:
    filling = batches(STREAM)
    stream = Stream(filling, 2)
    outcome = stream.fill()
    controller, late = next((c, slot) for c, slot in stream.flying if slot.position in outcome.carried)
    assert filling.land(controller, late.position, True) == []
    assert filling.outcome == outcome


def test_a_bad_medium_in_a_stream_is_replaced_and_left_out_from_then_on() -> None:
    filling = batches(STREAM)
    bad = frozenset(range(0, 100, 4))
    for _ in range(8):
        stream = Stream(filling, 2)
        outcome = stream.fill(bad)
        assert len(outcome.kept) == 8
        assert not bad & {stream.begun[position][1].index for position in outcome.kept}
    assert filling.order.skipped["train"] and filling.order.skipped["train"] <= bad


def test_a_checkpoint_whose_prompts_came_in_another_order_is_refused() -> None:
    cursor = {"num_samples": 100, "seed": 3, "epoch": 0, "place": 4, "num_drawn": 4, "skipped": []}
    with pytest.raises(CheckpointError, match="of an earlier version"):
        StepBatches.from_state(RULE, {"cursor": cursor, "expected_signal_frac": 1.0, "carried": []})


CUT_OFF = SamplingRule(num_groups=4, replaces_groups=True, max_prompts=16, over_dispatch=2)


def given_up(batches: StepBatches, num_controllers: int) -> dict[int, int]:
    """Return [position] the controller that gets each prompt at the begin of the stream after a start from here."""
    state = json.loads(json.dumps(batches.begun_state()))
    again = StepBatches.from_state(CUT_OFF, state)
    again.begin_step()
    shares = again.open(num_controllers)
    assert again.begun_state()["order"] == again.order.state()
    return {slot.position: controller for controller, share in enumerate(shares) for slot in share}


def test_a_stream_that_is_given_up_goes_on_with_all_its_prompts_at_the_controllers_that_had_them() -> None:
    one = batches(CUT_OFF)
    one.begin_step()
    shares = one.open(2)
    assert [slot.position for slot in shares[0]] == [0, 2, 4, 6]
    assert given_up(one, 2) == {at: at % 2 for at in range(8)}
    (further,) = one.land(0, 0, None)
    assert one.land(1, 1, False) and further.position == 8, "a prompt that cannot be used is replaced"
    wanted = {at: at % 2 for at in range(1, 8)} | {8: 0, 9: 1}
    found = given_up(one, 2)
    assert {at: found[at] for at in wanted} == wanted and 0 not in found
    for position in (2, 3, 4, 5):
        one.land(position % 2, position, True)
    assert one.outcome is not None
    assert wanted.items() <= given_up(one, 2).items(), "also when the batch is full already"
    assert set(given_up(one, 1).values()) == {0}
    one.begin_step()
    assert given_up(batches(CUT_OFF), 2) == {at: at % 2 for at in range(8)}, "nothing was begun"
    assert not one.begun_state()["carried"], "the tail was dropped, and a step begins"


def test_a_step_in_turns_that_is_given_up_goes_on_with_the_prompts_of_all_its_rounds() -> None:
    one = StepBatches(CUT_OFF, order_of(100, seed=3), in_turns=True)
    one.begin_step()
    positions = [slot.position for share in one.open(1) for slot in share]
    for position in positions[:4]:
        one.land(0, position, True)
    assert one.outcome is not None
    assert not one.finish_round([[(position, position > 1) for position in one.outcome.kept]]).is_full
    later = [slot.position for share in one.open(1) for slot in share]
    assert given_up(one, 1).keys() == {*positions, *later}
