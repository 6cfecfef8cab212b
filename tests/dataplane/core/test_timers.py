"""Tests of timers: many in one thread. Each call is made once, at its moment, in order, and never after it was
cancelled."""

import math
import threading
import time
from queue import SimpleQueue

import pytest

from dataplane.core.timers import Timers
from tests.dataplane.shards import wait_until


def test_what_is_due_runs_in_order_and_what_was_cancelled_or_moved_does_not() -> None:
    ran: SimpleQueue[str] = SimpleQueue()
    timers, now = Timers(), time.monotonic()
    timers.start(now - 1, lambda: ran.put("second"))
    never = timers.start(now + 0.3, lambda: ran.put("never"))
    timers.cancel(never)
    late = timers.start(now + 0.3, lambda: ran.put("late"))
    late.at = now + 600
    timers.start(now - 2, lambda: ran.put("first"))
    assert [ran.get(timeout=60), ran.get(timeout=60)] == ["first", "second"]
    timers.start(now + 0.6, lambda: ran.put("last"))
    assert ran.get(timeout=60) == "last" and ran.empty()
    assert timers._pending == {late}
    timers.cancel(late)
    timers.cancel(late)


def test_an_error_ends_nothing_but_its_own_call() -> None:
    ran: SimpleQueue[int] = SimpleQueue()
    timers, now = Timers(), time.monotonic()
    timers.start(now - 1, lambda: 1 / 0)
    timers.start(now, lambda: ran.put(1))
    assert ran.get(timeout=60) == 1


def test_a_block_that_ends_in_time_is_not_cut_and_one_that_does_not_is() -> None:
    timers, is_cut = Timers(), threading.Event()
    with timers.limit(time.monotonic() + 60, lambda: 1 / 0), timers.limit(math.inf, lambda: 1 / 0):
        pass
    assert not timers._pending
    with timers.limit(time.monotonic(), is_cut.set):
        assert is_cut.wait(20)
    is_cut.clear()
    with timers.limit(time.monotonic() + 600, is_cut.set) as limit:
        limit.at = time.monotonic()
        assert is_cut.wait(20)


def test_ten_thousand_timers_take_one_thread_which_ends_when_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.core.timers._IDLE_S", 0.2)
    timers, before = Timers(), threading.active_count()
    started = [timers.start(time.monotonic() + 600, lambda: 1 / 0) for _ in range(10_000)]
    assert timers._is_running and threading.active_count() <= before + 1
    for timer in started:
        timers.cancel(timer)
    wait_until(lambda: not timers._is_running and threading.active_count() <= before)


def test_after_a_thread_that_could_not_be_started_the_next_timer_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, is_cut, is_refused = Timers(), threading.Event(), threading.Event()

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"), timers.limit(time.monotonic(), is_refused.set):
            pass
    with timers.limit(time.monotonic(), is_cut.set):
        assert is_cut.wait(20)
    assert not is_refused.is_set()
