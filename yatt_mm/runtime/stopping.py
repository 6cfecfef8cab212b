"""Whether a run has to stop before its last step, and what is said of it: it was told to by a signal, `train.max_time`
runs out, or there are more hosts for it."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from yatt_mm.common.errors import ConfigError, RunStopped, YattError
from yatt_mm.runtime.signals import interrupt_on_signals, on_signals

ENDING_S = 10.0
"""The seconds that the end of a run's processes may take."""
ONE_SIGNAL_S = 1.0
"""Signals that follow each other within these seconds are one: some programs send theirs to a process and its group."""
FINISHED_FIRST = tuple(f"time/{what}_s" for what in ("train", "publish", "eval", "checkpoint", "commit"))
"""The metrics of what is done to the end, or for the stop itself, after a run was told to stop."""


class Stopping:
    """Says why a run has to stop now."""

    def __init__(self, max_time_s: float | None, *, before_s: float = 0.0) -> None:
        """`before_s`: the time that the run has taken before now, with other launchers."""
        self.is_by_time = False
        """True if `train.max_time` was the reason."""
        self._started_s = time.monotonic() - before_s
        self._max_time_s = max_time_s
        self._longest_s = 0.0
        self._signal = ""
        self._more_hosts = ""

    def listen(self, console: Console) -> None:
        """From now on the first SIGINT, SIGTERM or SIGHUP lets the run stop, and a second one interrupts it."""
        told_s = 0.0

        def stop(signum: int, frame: object) -> None:
            nonlocal told_s
            if not self._signal:
                self._signal, told_s = signal.Signals(signum).name, time.monotonic()
            elif time.monotonic() - told_s > ONE_SIGNAL_S:
                interrupt_on_signals(console)
                signal.raise_signal(signal.SIGINT)  # whatever it is, what came after the last checkpoint is lost

        on_signals(stop)

    def take(self, record: Mapping[str, Any]) -> None:
        """Take the metrics of a step, which say how long a stop takes."""
        self._longest_s = max(self._longest_s, sum(record.get(name, 0.0) for name in FINISHED_FIRST))

    def use_more_hosts(self, why: str) -> None:
        """Let the run stop, so that it can be started again with more hosts."""
        self._more_hosts = why

    def why(self) -> str:
        """Return why the run has to stop now; empty if it has not."""
        if self._signal:
            return self._signal
        if self._max_time_s is not None:
            # twice the longest time so far, because the next one may be longer
            self.is_by_time = self._max_time_s - self.seconds < ENDING_S + 2 * self._longest_s
            if self.is_by_time:
                return f"train.max_time of {self._max_time_s:g} s runs out"
        return self._more_hosts

    def error_after(self, step: int, *, run_dir: Path, has_moved: bool) -> YattError:
        """Return the error that ends a run which has stopped after `step`. `has_moved`: False if it is where it was
        resumed."""
        if self.is_by_time and not has_moved:
            return ConfigError(
                f"train.max_time of {self._max_time_s:g} s is too short: no step ended in it, so starting again would "
                "not help; raise it, or make steps shorter (fewer prompts or responses)"
            )
        return RunStopped(
            f"saved after step {step} and stopped ({self.why()}); start {run_dir} again with --resume to go on"
        )

    @property
    def is_to_grow(self) -> bool:
        """True if the run stops to be started again with more hosts, and for nothing else."""
        return bool(self._more_hosts) and self.why() == self._more_hosts

    @property
    def seconds(self) -> float:
        """The seconds since the run started."""
        return time.monotonic() - self._started_s
