"""Tests of what controllers do about steps whose update was skipped. A run in
tests/yatt_mm/whole_runs/test_first_hour.py has the real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.yatt_mm.control.test_failure_watch import OneMeeting
from tests.yatt_mm.generation.fakes import prompt
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.common.errors import TrainingError
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.control.skipped_steps import SkippedSteps
from yatt_mm.protocol.control import ScoredGroup, Slot
from yatt_mm.protocol.rollout import GroupRef


def config_with(*overrides: str) -> Config:
    return load_config("configs/digits_cpu.yaml", list(overrides))


def watch_of(meeting: OneMeeting, folder: Path, *overrides: str, controller: int = 0) -> SkippedSteps:
    config = config_with("faults.max_skipped_steps=2", *overrides)
    return SkippedSteps(config, folder, cast(RendezvousClient, meeting), controller=controller)


def group(*rewards: float) -> ScoredGroup:
    ref = GroupRef(
        slot=7,
        ref=cast(Any, None),
        media=(),
        num_prompt_tokens=4,
        lengths=(1,) * len(rewards),
        finish_reasons=("stop",) * len(rewards),
        policy_versions=((3, 3),) * len(rewards),
    )
    return ScoredGroup(prompt=prompt(Slot(position=7, epoch=1, index=3)), group=ref, rewards=rewards)


@pytest.mark.parametrize(
    ("mine", "theirs", "is_wrong"),
    [((0.0, 1.0), False, False), ((0.0, 1.1), False, True), ((-0.1, 1.0), False, True), ((0.0, 1.0), True, True)],
)
def test_a_reward_out_of_its_range_is_noticed_by_all_controllers(
    mine: tuple[float, ...], theirs: bool, is_wrong: bool, tmp_path: Path
) -> None:
    watch = watch_of(OneMeeting(theirs), tmp_path, "reward.range=[0, 1]")
    assert watch.has_wrong_rewards([group(0.5, 0.5), group(*mine)]) is is_wrong


def test_without_a_range_every_reward_is_right_and_nothing_is_asked(tmp_path: Path) -> None:
    assert not watch_of(OneMeeting(), tmp_path).has_wrong_rewards([group(1e30, -1e30)])


def test_a_skipped_step_is_told_and_written_down(tmp_path: Path) -> None:
    meeting = OneMeeting()
    watch_of(meeting, tmp_path).note(12, [group(0.5, 9.0)], why="a reward is out of its range")
    folder = tmp_path / "step_000012"
    assert meeting.records == [
        {"kind": "skipped", "step": 12, "why": "a reward is out of its range", "folder": str(folder)}
    ]
    (line,) = (folder / "groups-0.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["position"], found["index"], found["rewards"]) == (7, 3, [0.5, 9.0])
    assert found["prompt"][0]["role"] == "user"


def test_too_many_in_a_row_end_the_run_and_one_good_step_between_them_does_not(tmp_path: Path) -> None:
    watch = watch_of(OneMeeting(None), tmp_path, controller=1)
    for step, why in enumerate(("nan", "nan", "", "nan", "nan")):
        watch.note(step, [], why=why)
    with pytest.raises(
        TrainingError, match=r"3 steps in a row were skipped, and faults.max_skipped_steps is 2; .* nan"
    ):
        watch.note(5, [], why="nan")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:06d}" for step in (0, 1, 3, 4, 5)]
