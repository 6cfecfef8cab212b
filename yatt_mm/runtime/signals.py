"""What Ctrl-C, SIGTERM and a closed terminal do to a run: they end it in an orderly way, once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SAVED_AND_STOPPED = 75
"""The exit status of a run that was told to stop and lost nothing (`EX_TEMPFAIL` of sysexits.h: try again)."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""
STOPPING = "stopping what this run started; one moment"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_interrupted_by = 0
"""The signal that raised the last KeyboardInterrupt. The error cannot say it: Ray raises another one in its place."""


def interrupted_by_people() -> bool:
    """Return True if the last KeyboardInterrupt came from SIGINT (Ctrl-C), and not from SIGTERM or SIGHUP, with which
    other programs end this one and may start it again."""
    return _interrupted_by in (0, signal.SIGINT)


def _interruption(signum: int) -> KeyboardInterrupt:
    global _interrupted_by
    _interrupted_by = signum
    return KeyboardInterrupt()


def on_signals(handler: Callable[[int, Any], None] | signal.Handlers) -> None:
    """From now on this handler takes SIGINT, SIGTERM and SIGHUP. A process that ignores SIGHUP, as `nohup` starts it,
    goes on to ignore it."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def signals_restored() -> Iterator[None]:
    """Restore the caller's signal handlers at the end of the block."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ending_signals_interrupt() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt for a block, also while modules are being imported."""

    def end(signum: int, frame: object) -> None:
        raise _interruption(signum)

    with signals_restored():
        on_signals(end)
        yield


def interrupt_on_signals(console: Console) -> None:
    """From now on the first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt. Later ones are only answered."""

    def interrupt(signum: int, frame: object) -> None:
        say_on_signals(console)
        console.print(STOPPING)
        raise _interruption(signum)

    on_signals(interrupt)


def say_on_signals(console: Console) -> None:
    """From now on SIGINT, SIGTERM and SIGHUP only print that the run is being stopped, so that stopping is not
    interrupted."""

    def say(signum: int, frame: object) -> None:
        console.print(STOPPING)

    on_signals(say)


def ignore_signals() -> None:
    """From now on SIGINT, SIGTERM and SIGHUP do nothing: the process is about to end, and has its exit status."""
    on_signals(signal.SIG_IGN)


def set_signals_again() -> None:
    """Set the present handlers again, after foreign code has given the signals another effect behind Python's back."""
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)


@contextmanager
def signals_held(console: Console) -> Iterator[None]:
    """Answer signals during a block that must not be interrupted. After it, the first that came has its effect."""
    came: list[int] = []

    def hold(signum: int, frame: object) -> None:
        came.append(signum)
        console.print(STOPPING)

    with signals_restored():
        on_signals(hold)
        yield
    if came:
        raise _interruption(came[0])
