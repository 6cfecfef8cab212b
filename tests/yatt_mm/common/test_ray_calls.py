"""Tests of waiting for calls to actors: which error a caller gets."""

import asyncio
import itertools
import time

import pytest
import ray

from yatt_mm.common import ray_calls
from yatt_mm.common.errors import RewardError, UnreachableError, WorkerError, YattError
from yatt_mm.common.ray_calls import own_words, reply_of, wait_all


def test_a_workers_own_timeout_is_told_in_its_words_and_not_taken_for_the_callers() -> None:
    error = ray.exceptions.RayTaskError("score", "", TimeoutError("the node did not reply in 5 s"))

    async def call() -> None:
        raise error.as_instanceof_cause()

    for deadline_s in (None, 60.0):
        with pytest.raises(WorkerError, match="engine 0 failed at sampling: TimeoutError: the node did not reply"):
            asyncio.run(reply_of(call(), name="engine 0", what="sampling", deadline_s=deadline_s))


def test_a_call_that_takes_longer_than_its_deadline_is_named() -> None:
    with pytest.raises(WorkerError, match=r"engine 0 did not finish sampling in 0\.01 s"):
        asyncio.run(reply_of(asyncio.sleep(60), name="engine 0", what="sampling", deadline_s=0.01))


@pytest.mark.parametrize(
    ("raised", "wanted", "words"),
    [
        (RewardError("all rewards failed"), RewardError, "^all rewards failed$"),
        (KeyError("step"), WorkerError, "^controller 0 failed at the run: KeyError: 'step'$"),
    ],
)
def test_an_error_of_this_package_is_told_without_who_passed_it_on(
    raised: Exception, wanted: type[YattError], words: str
) -> None:
    async def call() -> None:
        raise ray.exceptions.RayTaskError("run", "", raised).as_instanceof_cause()

    with pytest.raises(wanted, match=words), own_words():
        asyncio.run(reply_of(call(), name="controller 0", what="the run"))


@pytest.mark.parametrize(
    ("raised", "is_unreachable"),
    [
        (ray.exceptions.ActorUnavailableError("connection reset", b"0" * 16), True),
        (ray.exceptions.RayTaskError("enter", "", UnreachableError("the link is down")).as_instanceof_cause(), True),
        (ray.exceptions.ActorUnavailableError("restarting. The task may be lost.", None), False),
        (ray.exceptions.ActorDiedError(), False),
        (ray.exceptions.RayTaskError("enter", "", WorkerError("it was lost")).as_instanceof_cause(), False),
    ],
)
def test_a_worker_that_could_not_be_reached_is_told_apart_from_a_lost_one(
    raised: Exception, is_unreachable: bool
) -> None:
    async def call() -> None:
        raise raised

    with pytest.raises(WorkerError, match=r"^the coordinator ") as found:
        asyncio.run(reply_of(call(), name="the coordinator", what="enter"))
    assert isinstance(found.value, UnreachableError) == is_unreachable


class Calls:
    """A fake of Ray's `wait`: the call ends after some questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, num_waits: int) -> None:
        self.num_waits = num_waits
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", lambda call: "done")

    def wait(self, calls: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        self.num_waits -= 1
        time.sleep(timeout if self.num_waits else 0)
        return ([], calls) if self.num_waits else (calls, [])


def test_what_workers_have_done_is_asked_only_of_a_call_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_calls, "POLL_S", 0.01)
    asked: list[int] = []
    for num_waits, num_asked in ((1, 0), (2, 1), (4, 3)):
        Calls(monkeypatch, num_waits=num_waits)
        asked.clear()
        done = wait_all([("engine 0", "call")], what="sampling", deadline_s=60, done_by=lambda: asked.append(1))  # type: ignore[list-item]
        assert done == ["done"] and len(asked) == num_asked


def test_a_worker_that_finishes_something_is_waited_for_and_one_that_stands_still_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_calls, "POLL_S", 0.01)
    Calls(monkeypatch, num_waits=50)
    count = itertools.count()
    assert wait_all([("engine 0", "call")], what="sampling", deadline_s=0.1, done_by=lambda: next(count))  # type: ignore[list-item]
    monkeypatch.setattr(ray_calls, "POLL_S", 60.0)
    calls = Calls(monkeypatch, num_waits=500)
    with pytest.raises(WorkerError, match=r"engine 0 did not finish sampling in 0\.1 s"):
        wait_all([("engine 0", "call")], what="sampling", deadline_s=0.1, done_by=lambda: 7)  # type: ignore[list-item]
    assert calls.num_waits == 500 - 2, "once until the deadline, and once to be sure"


def test_a_call_that_goes_on_for_too_long_is_named_although_its_worker_is_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_calls, "POLL_S", 0.01)
    Calls(monkeypatch, num_waits=500)
    count = itertools.count()
    with pytest.raises(WorkerError, match=r"rank 0 did not finish save in 0\.2 s"):
        wait_all([("rank 0", "call")], what="save", deadline_s=60, at_most_s=0.2, done_by=lambda: next(count))  # type: ignore[list-item]
