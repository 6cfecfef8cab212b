"""Tests of the advantages of a batch that several controllers have together."""

from __future__ import annotations

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
    found = [one.advantages for one in with_advantages(mine, settings, others)]
    num = 8 * length
    std = (num * (3 / 8) * (5 / 8) / (num - 1)) ** 0.5
    low, high = -3 / 8 / std, 5 / 8 / std
    assert [value for pair in found for value in pair] == pytest.approx([low, high, high, high], rel=1e-5)


def test_groups_that_are_compared_with_themselves_need_no_meeting() -> None:
    nowhere: Any = Meeting(None)
    (found,) = with_advantages([scored(0, (0.0, 1.0))], AlgorithmSettings(name="dr_grpo"), nowhere)
    assert found.advantages == (-0.5, 0.5)
