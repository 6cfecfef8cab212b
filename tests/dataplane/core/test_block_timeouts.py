"""Tests of deadlines for `with` blocks, which one thread watches."""

import threading
import time

import pytest

from dataplane.core.block_timeouts import BlockTimeouts


def test_a_block_that_ends_in_time_is_not_cut_and_one_that_does_not_is() -> None:
    overdue, is_cut = BlockTimeouts(), threading.Event()
    with overdue.call_at(time.monotonic() + 60, lambda: 1 / 0):
        pass
    with overdue.call_at(time.monotonic(), is_cut.set):
        assert is_cut.wait(20)


def test_one_thread_watches_many_waits() -> None:
    overdue, cuts = BlockTimeouts(), [threading.Event() for _ in range(20)]
    before = threading.active_count()
    for event in cuts:
        with overdue.call_at(time.monotonic(), event.set), overdue.call_at(time.monotonic() + 60, event.set):
            assert threading.active_count() <= before + 1
            assert event.wait(20)


def test_after_a_thread_that_could_not_be_started_the_next_wait_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    overdue, is_cut, is_refused = BlockTimeouts(), threading.Event(), threading.Event()

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"), overdue.call_at(time.monotonic(), is_refused.set):
            pass
    with overdue.call_at(time.monotonic(), is_cut.set):
        assert is_cut.wait(20)
    assert not is_refused.is_set()
