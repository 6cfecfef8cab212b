"""Tests of timers: many deadlines in one thread. Each is called once, at its time, in order, and never after it was
cancelled."""

import threading
from queue import SimpleQueue

from dataplane.core.timers import Timers
from tests.dataplane.shards import wait_until


def test_what_is_due_runs_in_order_and_what_was_called_off_does_not() -> None:
    ran: SimpleQueue[str] = SimpleQueue()
    deadlines = Timers(ran.put, "test")
    with deadlines._changed:  # nothing is due before all is said, however long that takes
        deadlines.set("second", 0.2)
        deadlines.set("never", 0.1)
        deadlines.set("late", 600)
        deadlines.set("first", 0.05)
        deadlines.set("again", 0.01)
        deadlines.set("again", 0.3)
        assert "never" in deadlines and len(deadlines) == 5
        deadlines.cancel("never")
        deadlines.cancel("unknown")
    assert [ran.get(timeout=60) for _ in range(3)] == ["first", "second", "again"]
    assert "late" in deadlines and len(deadlines) == 1
    deadlines.close()


def test_an_error_ends_nothing_but_its_own_run() -> None:
    ran: SimpleQueue[float] = SimpleQueue()
    deadlines = Timers(lambda key: ran.put(1 / int(key)), "test")
    deadlines.set("0", 0.0)
    deadlines.set("1", 0.0)
    assert ran.get(timeout=60) == 1
    deadlines.close()


def test_ten_thousand_deadlines_take_one_thread() -> None:
    def num_threads() -> int:
        return sum(thread.name == "ten thousand" for thread in threading.enumerate())

    ran: SimpleQueue[str] = SimpleQueue()
    deadlines = Timers(ran.put, "ten thousand")
    for number in range(10_000):
        deadlines.set(str(number), 600)
    assert num_threads() == 1
    deadlines.close()
    wait_until(lambda: num_threads() == 0)
    assert ran.empty()
