"""Tests of what controllers do about responses without a reward. The run of tests/yatt_mm/whole_runs/test_first_hour.py
has the real rendezvous and reward workers."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.yatt_mm.generation.fakes import prompt
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.common.errors import RewardError
from yatt_mm.config.sections import RewardSection
from yatt_mm.control.reward_faults import RewardFaults
from yatt_mm.protocol.control import ScoredGroup, Slot
from yatt_mm.protocol.rewards import RewardFault


class OneMeeting:
    """A rendezvous of two controllers, of which the other one has brought `other` before."""

    def __init__(self, *other: Any) -> None:
        self._other = list(other)
        self.records: list[dict[str, Any]] = []

    def gather(self, mine: Any) -> list[Any]:
        return [mine, self._other.pop(0)]

    def put_record(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def fault(what: str, line: int) -> RewardFault:
    return RewardFault(what=what, where=f"my.py:{line}", response="7", trace="the lines")


def group(num_errors: int, first: RewardFault | None) -> ScoredGroup:
    slot = Slot(position=0, epoch=0, index=0)
    return ScoredGroup(
        prompt=prompt(slot), group=cast(Any, None), rewards=(0.0,) * 4, num_errors=num_errors, fault=first
    )


def faults(meeting: OneMeeting, **section: Any) -> RewardFaults:
    return RewardFaults(cast(RendezvousClient, meeting), RewardSection(function="my.py:f", **section))


def test_each_kind_of_fault_is_told_once_with_the_counts_of_all_controllers() -> None:
    other = {("my.py:9", "KeyError"): fault("KeyError: 'x'", 9)}
    meeting = OneMeeting((2, 8, other), (0, 8, {}))
    watch = faults(meeting)
    mine = [group(0, None), group(1, fault("ValueError: a", 3)), group(1, fault("ValueError: b", 3))]
    assert watch.check(mine, among="step 1", tells=True) == 4
    told = {record["where"]: record for record in meeting.records}
    assert sorted(told) == ["my.py:3", "my.py:9"]
    assert told["my.py:3"] == {
        "kind": "reward_fault",
        "function": "my.py:f",
        "what": "ValueError: a",
        "where": "my.py:3",
        "response": "7",
        "trace": "the lines",
        "num_errors": 4,
        "num_responses": 20,
        "among": "step 1",
    }
    assert watch.check([group(1, fault("ValueError: c", 3))], among="step 2", tells=True) == 1
    assert len(meeting.records) == 2, "it was told before"


def test_one_controller_tells() -> None:
    meeting = OneMeeting((0, 4, {}))
    assert faults(meeting).check([group(1, fault("ValueError: a", 3))], among="step 1", tells=False) == 1
    assert meeting.records == []


@pytest.mark.parametrize(("max_error_frac", "num_errors"), [(1.0, 4), (0.5, 4), (0.5, 2)])
def test_too_many_faults_end_the_run(max_error_frac: float, num_errors: int) -> None:
    meeting = OneMeeting((num_errors, 4, {}))
    message = rf"my.py:f failed on {2 * num_errors} of the 8 responses of step 1, .* ValueError: a \(my.py:3\); repair"
    with pytest.raises(RewardError, match=message):
        faults(meeting, max_error_frac=max_error_frac).check(
            [group(num_errors, fault("ValueError: a", 3))], among="step 1", tells=True
        )
    assert len(meeting.records) == 1, "told before the run ends"


def test_fewer_faults_or_none_do_not_end_it() -> None:
    watch = faults(OneMeeting((3, 4, {}), (0, 4, {})))
    assert watch.check([group(4, fault("ValueError: a", 3))], among="step 1", tells=True) == 7
    assert watch.check([group(0, None)], among="step 2", tells=True) == 0
