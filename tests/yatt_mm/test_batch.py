"""A step's batch is filled in rounds: the same prompts in the same order, whoever and however many do the work."""

from __future__ import annotations

import json
import random

import pytest

from yatt_mm.control.batch import Batches, RoundOutcome
from yatt_mm.control.cursor import PromptCursor, Slot
from yatt_mm.sampling import SamplingRule

RULE = SamplingRule(num_groups=8, replaces_groups=True, max_prompts=32)


def batches(rule: SamplingRule = RULE, num_samples: int = 100) -> Batches:
    return Batches(rule, PromptCursor(num_samples=num_samples, seed=3))


def has_signal(slot: Slot) -> bool:
    """Half of the prompts teach nothing, ever."""
    return slot.index % 2 == 0


def fill(batches: Batches, num_controllers: int, bad: frozenset[int] = frozenset()) -> tuple[RoundOutcome, list[Slot]]:
    """One step, as the controllers do it, in an order of arrival that is never the same; the slots that were used."""
    used: list[Slot] = []
    while True:
        shares: list[list[Slot]] = [[] for _ in range(num_controllers)]
        faults: list[list[int]] = [[] for _ in range(num_controllers)]
        while True:
            for share, dealt in zip(shares, batches.deal(faults)):
                share += dealt
            faults = [[slot.index for slot in share if slot.index in bad] for share in shares]
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
    filling = Batches(RULE, PromptCursor(num_samples=100, seed=3))
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
    again = [slot for share in filling.deal([[slot.index] for slot in first]) for slot in share]
    assert len(again) == 2
    assert not {slot.index for slot in first} & {slot.index for slot in again}


def test_without_replacement_a_step_takes_what_it_draws() -> None:
    plain = batches(SamplingRule(num_groups=8, max_prompts=8))
    outcome, used = fill(plain, 3)
    assert outcome.kept == tuple(range(8)) == tuple(slot.position for slot in used)


def test_a_checkpoint_continues_with_the_same_prompts() -> None:
    straight = batches()
    fill(straight, 2)
    resumed = Batches.from_state(RULE, json.loads(json.dumps(straight.state())))
    for _ in range(3):
        assert fill(resumed, 1) == fill(straight, 2)
