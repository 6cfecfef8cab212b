"""Tests of an agent that changes the states of its host's units. Fakes replace Ray's calls; the runs in tests/hosts
have real ones."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
import ray

from yatt_mm.common.errors import WorkerError
from yatt_mm.common.held_memory import StateReport
from yatt_mm.placement.state_changes import change_on_host
from yatt_mm.protocol.placement_model import State

SOON_S, LATER_S = 0.05, 0.2


class Worker:
    """A fake unit that replies after some seconds; it is its own call."""

    def __init__(self, seconds: float, held_bytes: int) -> None:
        self.seconds = seconds
        self.report = StateReport(held_bytes=held_bytes)
        self.set_state = self

    def remote(self, state: State) -> Worker:
        self.at_s = time.monotonic() + self.seconds
        self.state = state
        return self


def wait(calls: Sequence[Worker], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
    first = min(calls, key=lambda call: call.at_s)
    time.sleep(max(0.0, min(timeout, first.at_s - time.monotonic())))
    return (
        ([first], [one for one in calls if one is not first]) if time.monotonic() >= first.at_s else ([], list(calls))
    )


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda call: call.report)


def test_each_unit_has_its_own_report_and_seconds() -> None:
    workers = {"engine 1": Worker(LATER_S, 1), "training rank 1": Worker(SOON_S, 2)}
    later, soon = change_on_host(workers, State.ASLEEP, deadline_s=10.0)
    assert (later.report.held_bytes, soon.report.held_bytes) == (1, 2)
    assert SOON_S <= soon.seconds < LATER_S <= later.seconds
    assert {worker.state for worker in workers.values()} == {State.ASLEEP}


def test_a_unit_that_does_not_change_in_time_is_named() -> None:
    workers = {"engine 1": Worker(SOON_S, 1), "engine 2": Worker(60.0, 2)}
    with pytest.raises(WorkerError, match=re.escape("engine 2 did not finish becoming awake in 0.2 s")):
        change_on_host(workers, State.AWAKE, deadline_s=0.2)
