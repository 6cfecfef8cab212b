"""Tests of the metrics of a step's responses: of all, of the parts of rewards, and of each training set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest

from dataplane.core.refs import Ref
from tests.yatt_mm.generation.fakes import prompt
from yatt_mm.generation.metrics import add_advantages, add_groups, resident_bytes
from yatt_mm.protocol.control import ScoredGroup, Slot
from yatt_mm.protocol.rewards import Scores
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.protocol.step_meter import StepMeter, merge


def group(
    position: int,
    set_name: str,
    rewards: tuple[float, ...],
    *,
    policy_versions: tuple[tuple[int, int], ...] = ((0, 0),) * 2,
    finish_reasons: tuple[str, ...] = ("stop", "length"),
    **parts: Any,
) -> ScoredGroup:
    ref = Ref(name=str(position), kind="plain", dtype="uint8", shape=(1,), nbytes=1, node="n", lineage=None)
    sampled = GroupRef(
        slot=position,
        ref=ref,
        media=(),
        num_prompt_tokens=1,
        lengths=(3, 5),
        policy_versions=policy_versions,
        finish_reasons=finish_reasons,
    )
    scores = (Scores(source="reward.function", values=rewards, parts=parts),)
    slot = Slot(position=position, epoch=0, index=position, set_name=set_name)
    return ScoredGroup(prompt=prompt(slot), group=sampled, rewards=rewards, scores=scores)


def metrics(*shares: list[ScoredGroup], step: int = 1) -> dict[str, float]:
    """Return the record of a step, of which each controller has a share."""
    meters = []
    for share in shares:
        meter = StepMeter()
        add_groups(meter, share, step=step, min_reward_range=0.001)
        meters.append(meter)
    return merge(meters)


def test_each_set_and_each_part_has_its_mean_over_all_controllers() -> None:
    record = metrics(
        [group(0, "a", (0.0, 1.0), accuracy=(0.0, 1.0)), group(1, "b", (1.0, 1.0), accuracy=(1.0, 1.0))],
        [group(2, "a", (0.0, 0.5), accuracy=(0.0, None), format=(0.0, 0.5))],
    )
    assert record["reward/mean"] == pytest.approx(3.5 / 6)
    assert record["reward/accuracy/mean"] == pytest.approx(3 / 5), "a response without this part does not count"
    assert record["reward/format/mean"] == 0.25
    assert (record["sets/a/num_prompts"], record["sets/b/num_prompts"]) == (2, 1)
    assert (record["sets/a/reward_mean"], record["sets/b/reward_mean"]) == (0.375, 1.0)
    assert (record["sets/a/has_signal_frac"], record["sets/b/has_signal_frac"]) == (1.0, 0.0)
    assert record["sets/a/length_mean"] == 4.0


def test_the_oldest_tokens_and_the_responses_that_were_cut_off_are_counted_over_all_controllers() -> None:
    old = group(0, "a", (0.0, 1.0), policy_versions=((3, 5), (4, 4)), finish_reasons=("length", "length"))
    fresh = group(1, "a", (0.0, 1.0), policy_versions=((6, 6), (5, 6)), finish_reasons=("stop", "length"))
    record = metrics([old], [fresh], step=7)
    assert record["rollout/staleness_max"] == 7 - 1 - 3
    assert record["rollout/truncated_frac"] == 0.75


def test_a_run_with_one_set_has_no_metrics_of_its_own_for_it() -> None:
    assert not [name for name in metrics([group(0, "train", (0.0, 1.0))]) if name.startswith("sets/")]


def test_a_group_of_equal_rewards_teaches_something_if_it_has_advantages() -> None:
    """Test what `reinforce_plus_plus` makes of a batch whose groups differ from each other alone."""
    groups = [replace(group(0, "a", (1.0, 1.0)), advantages=(1.0, 1.0)), group(1, "a", (0.0, 1.0))]
    meters = [StepMeter(), StepMeter()]
    for meter, one in zip(meters, groups):
        add_advantages(meter, [one])
    assert merge(meters)["reward/has_advantage_frac"] == 0.5


def test_the_resident_memory_is_what_the_system_counts_and_grows_with_what_is_written() -> None:
    before = resident_bytes()
    written = np.ones(64 << 20, np.uint8)
    grown = resident_bytes() - before
    assert written.nbytes * 0.9 < grown < written.nbytes * 1.5
    assert resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
