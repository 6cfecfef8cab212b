"""Tests of what controllers do about responses without a score. The run of tests/yatt_mm/whole_runs/test_first_hour.py
has the real rendezvous and reward workers."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from tests.yatt_mm.generation.fakes import prompt
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.common.errors import RewardError
from yatt_mm.config.judge_section import JudgeSection
from yatt_mm.config.sections import RewardSection
from yatt_mm.control.failure_watch import FailureWatch
from yatt_mm.protocol.control import ScoredGroup, Slot
from yatt_mm.protocol.faults import FUNCTION, Failures, Fault


class OneMeeting:
    """A rendezvous of two controllers, of which the other one has brought `other` before."""

    def __init__(self, *other: Any) -> None:
        self._other = list(other)
        self.records: list[dict[str, Any]] = []
        self.events: list[str] = []

    def gather(self, mine: Any) -> list[Any]:
        self.events.append("meeting")
        return [mine, self._other.pop(0)]

    def put_record(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def fault(what: str, line: int) -> Fault:
    return Fault(what=what, where=f"my.py:{line}", response="7", trace="the lines")


def group(*failures: Failures) -> ScoredGroup:
    slot = Slot(position=0, epoch=0, index=0)
    return ScoredGroup(prompt=prompt(slot), group=cast(Any, None), rewards=(0.0,) * 4, failures=failures)


def function(num: int, what: str, line: int = 3) -> Failures:
    return Failures(source=FUNCTION, num=num, fault=fault(what, line))


def watch_of(meeting: OneMeeting, **settings: Any) -> FailureWatch:
    away = JudgeSection(model="m", url="http://host:8000/v1", score_on_failure=0.5)
    judges = {"away": away, "own": JudgeSection(model="m")}
    section = RewardSection(function="my.py:f", judges=judges, **settings)
    return FailureWatch(
        cast(RendezvousClient, meeting), section, ["my.py:f"], before_end=lambda: meeting.events.append("end")
    )


def brought(num: int, *failures: Failures) -> Any:
    """Return what the other controller has brought: `num` responses with these failures."""
    failed: Counter[str] = Counter()
    for one in failures:
        failed[one.source] += one.num
    return num, failed, {(one.source, one.fault.kind): one.fault for one in failures}


NONE = brought(4)


def test_each_kind_of_fault_is_told_once_with_the_counts_of_all_controllers() -> None:
    meeting = OneMeeting(brought(8, function(2, "KeyError: 'x'", 9)), brought(8))
    watch = watch_of(meeting)
    mine = [group(), group(function(1, "ValueError: a")), group(function(1, "ValueError: b"))]
    watch.check(mine, among="step 1", tells=True)
    told = {record["where"]: record for record in meeting.records}
    assert sorted(told) == ["my.py:3", "my.py:9"]
    assert told["my.py:3"] == {
        "kind": "failure",
        "who": "reward.function my.py:f",
        "score": "0",
        "what": "ValueError: a",
        "where": "my.py:3",
        "response": "7",
        "trace": "the lines",
        "num_failed": 4,
        "num_responses": 20,
        "among": "step 1",
    }
    watch.check([group(function(1, "ValueError: c"))], among="step 2", tells=True)
    assert len(meeting.records) == 2, "it was told before"


def judge(num: int, name: str = "away") -> Failures:
    return Failures(source=f"reward.judges.{name}", num=num, fault=Fault(what="status 400: no", where="m at http://x"))


def test_a_judge_that_gives_no_verdict_is_told_and_does_not_end_a_run_that_allows_it() -> None:
    meeting = OneMeeting(NONE)
    watch_of(meeting, max_failed_frac=1).check([group(judge(4))], among="step 1", tells=True)
    (record,) = meeting.records
    assert (record["who"], record["num_failed"], record["num_responses"]) == ("reward.judges.away", 4, 8)
    assert record["score"] == "0.5 (reward.judges.away.score_on_failure)"


def test_one_controller_tells() -> None:
    meeting = OneMeeting(NONE)
    watch_of(meeting).check([group(function(1, "ValueError: a"))], among="step 1", tells=False)
    assert meeting.records == []


@pytest.mark.parametrize(("settings", "num"), [({}, 4), ({"max_error_frac": 0.5}, 4), ({"max_error_frac": 0.5}, 2)])
def test_too_many_failures_of_the_function_end_the_run(settings: dict[str, float], num: int) -> None:
    meeting = OneMeeting(brought(4, function(num, "ValueError: a")), None)
    message = rf"my.py:f failed on {2 * num} of the 8 responses of step 1, .* ValueError: a \(my.py:3\); repair"
    with pytest.raises(RewardError, match=message):
        watch_of(meeting, **settings).check([group(function(num, "ValueError: a"))], among="step 1", tells=True)
    assert len(meeting.records) == 1, "told before the run ends"
    assert meeting.events == ["meeting", "end", "meeting"], "all have kept their responses before one raises"


@pytest.mark.parametrize(
    ("name", "repair"),
    [
        ("away", "see that the server is there and takes such requests, or raise reward.max_failed_frac"),
        ("own", r"see what reward\.judges\.own\.template asks, and what the judge says to it \(its log\), or raise"),
    ],
)
def test_too_many_failures_of_one_judge_end_the_run(name: str, repair: str) -> None:
    meeting = OneMeeting(brought(4, judge(1, name)), None)
    message = (
        rf"reward\.judges\.{name} failed on 2 of the 8 responses of step 3, and reward\.max_failed_frac is 0\.2: "
        rf"status 400: no \(m at http://x\); {repair}"
    )
    with pytest.raises(RewardError, match=message):
        watch_of(meeting).check([group(judge(1, name))], among="step 3", tells=True)
    assert meeting.events == ["meeting", "end", "meeting"]


def test_fewer_failures_or_none_do_not_end_it() -> None:
    few = (function(3, "ValueError: a"), judge(1, "own"), judge(1))
    watch = watch_of(OneMeeting(brought(4), NONE, brought(4, *few)), max_failed_frac=0.25)
    watch.check([group(function(2, "ValueError: a"), judge(2), judge(2, "own"))], among="step 1", tells=True)
    watch.check([group()], among="step 2", tells=True)
    watch.check([group(*few)], among="the evaluation at step 2", tells=True)
