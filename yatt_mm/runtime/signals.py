"""What Ctrl-C, SIGTERM and a closed terminal do to a run: end it in good order, once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_restored() -> Iterator[None]:
    """Put the caller's handlers back at the end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_on_signals() -> None:
    """From now on each of them raises KeyboardInterrupt."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt)


def say_on_signals(console: Console) -> None:
    """From now on they only say that things are being stopped: nothing may be left behind half stopped."""

    def say(signum: int, frame: object) -> None:
        console.print("stopping what this run started; one moment")

    for number in SIGNALS:
        signal.signal(number, say)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold them back in a block that must not be cut in two; one that came raises KeyboardInterrupt after it."""
    came: list[int] = []
    with signals_restored():
        for number in SIGNALS:
            signal.signal(number, lambda signum, frame: came.append(signum))
        yield
    if came:
        raise KeyboardInterrupt
