"""Makes threads late at random, in every Python process that has this folder in PYTHONPATH.

A thread may begin late, and a wait on a condition, an event or a queue may return late. The seed is in
`YATT_TEST_DELAYS`.
"""

import os
import random
import threading
import time

START_SHARE, START_S = 0.3, 0.2
"""The share of threads that begin late, and by how much at most, in seconds."""
WAKE_SHARE, WAKE_S = 0.1, 0.1
"""The share of waits that return late, and by how much at most, in seconds."""


def _install(seed: str) -> None:
    draw = random.Random(f"{seed} {os.getpid()}")
    os.register_at_fork(after_in_child=lambda: draw.seed(f"{seed} {os.getpid()}"))
    begin, wait = threading.Thread._bootstrap_inner, threading.Condition.wait

    def late(share: float, most_s: float) -> None:
        if draw.random() < share:
            time.sleep(draw.random() * most_s)

    def begin_late(thread: threading.Thread) -> None:
        late(START_SHARE, START_S)
        begin(thread)

    def wait_late(condition: threading.Condition, timeout: float | None = None) -> bool:
        found = wait(condition, timeout)
        late(WAKE_SHARE, WAKE_S)
        return found

    threading.Thread._bootstrap_inner = begin_late
    threading.Condition.wait = wait_late


if "YATT_TEST_DELAYS" in os.environ:
    _install(os.environ["YATT_TEST_DELAYS"])
