"""Tests of the advantages of a batch that several controllers have together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.yatt_mm.generation.fakes import group, prompt
from yatt_mm.algorithms.settings import AlgorithmSettings
from yatt_mm.common.conversation import ask
from yatt_mm.control.advantages import with_advantages
from yatt_mm.protocol.control import ScoredGroup, Slot
from yatt_mm.protocol.rollout import PromptTask


class Meeting:
    """A rendezvous at which another controller brings what it has."""

    def __init__(self, others: list[Any] | None) -> None:
        self._others = others

    def gather(self, mine: list[Any]) -> list[list[Any]]:
        assert self._others is not None, "this algorithm needs no meeting"
        return [mine, self._others]


def scored(position: int, rewards: tuple[float, float]) -> ScoredGroup:
    task = PromptTask(slot=position, conversation=ask("?"), media=(), num_samples=2, seed=0, name=f"group/{position}")
    slot = Slot(position=position, epoch=0, index=position)
    return ScoredGroup(prompt=prompt(slot), group=group(task, "stop"), rewards=rewards)


def test_groups_are_compared_with_the_batch_of_all_controllers() -> None:
    mine = [scored(0, (0.0, 1.0)), scored(1, (1.0, 1.0))]
    (length,) = {length for one in mine for length in one.group.lengths}
    # with the other controller's rewards of 0 there are 8 responses, of which 3 have the reward 1
    others: Any = Meeting([(0.0, length)] * 4)
    settings = AlgorithmSettings(name="reinforce_plus_plus")
    found = [one.advantages for one in with_advantages(mine, settings, others, max_tokens=9)]
    num = 8 * length
    std = (num * (3 / 8) * (5 / 8) / (num - 1)) ** 0.5
    low, high = -3 / 8 / std, 5 / 8 / std
    assert [value for pair in found for value in pair] == pytest.approx([low, high, high, high], rel=1e-5)


def test_groups_that_are_compared_with_themselves_need_no_meeting() -> None:
    nowhere: Any = Meeting(None)
    (found,) = with_advantages([scored(0, (0.0, 1.0))], AlgorithmSettings(name="dr_grpo"), nowhere, max_tokens=9)
    assert found.advantages == (-0.5, 0.5)


def test_long_responses_lose_reward_in_the_advantages_alone() -> None:
    nowhere: Any = Meeting(None)
    one = scored(0, (1.0, 1.0))
    one = replace(one, group=replace(one.group, lengths=(5, 9)))
    # the buffer begins after 6 of 10 tokens: 9 tokens lose 3/4 of the penalty of 2
    settings = AlgorithmSettings(name="dr_grpo", overlong_buffer=4, overlong_penalty=2.0)
    (found,) = with_advantages([one], settings, nowhere, max_tokens=10)
    assert found.advantages == (0.75, -0.75) and found.rewards == (1.0, 1.0)
    whole = AlgorithmSettings(name="reinforce_plus_plus", overlong_buffer=4, overlong_penalty=2.0)
    others: Any = Meeting([(1.0, 6)])
    (found,) = with_advantages([one], whole, others, max_tokens=10)
    # 9 of the batch's 20 tokens have the reward -0.5, and the others 1
    std = (20 * 1.5**2 * (9 / 20) * (11 / 20) / 19) ** 0.5
    assert found.advantages == pytest.approx((1.5 * 9 / 20 / std, -1.5 * 11 / 20 / std), rel=1e-5)


def test_what_is_lost_for_the_distance_from_the_reference_is_in_the_advantages_alone() -> None:
    nowhere: Any = Meeting(None)
    one = scored(3, (1.0, 0.0))
    given: Any = {"max_tokens": 9, "divergences": {3: (5.0, -1.0)}, "kl_coef": 0.1}
    (found,) = with_advantages([one], AlgorithmSettings(name="dr_grpo"), nowhere, **given)
    assert found.advantages == pytest.approx((0.2, -0.2)) and found.rewards == (1.0, 0.0)
    others: Any = Meeting([])
    (found,) = with_advantages([one], AlgorithmSettings(name="reinforce_plus_plus"), others, **given)
    num = sum(one.group.lengths)
    std = (num * 0.2**2 / (num - 1)) ** 0.5
    assert found.advantages == pytest.approx((0.2 / std, -0.2 / std), rel=1e-5)
