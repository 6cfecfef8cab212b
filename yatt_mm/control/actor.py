"""The Ray actor of a controller: it runs the loop, and tells the other controllers when it fails."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from yatt_mm.common.errors import YattError
from yatt_mm.config.run_config import Config
from yatt_mm.control.controller import Controller
from yatt_mm.control.loop import evaluate, train
from yatt_mm.protocol.control import RunStart, Team

FORBIDDEN_MODULES = ("torch", "vllm", "PIL", "av", "decord", "dataplane.client.reader")
"""Modules that a controller must not import: a process that cannot name a tensor cannot hold one."""
SEGMENT_MARK = "/dev/shm/dataplane-"


class ControllerActor:
    """The body of the Ray actor."""

    def __init__(self, *, index: int, config: Config, team: Team, start: RunStart) -> None:
        self._controller = Controller(index=index, config=config, team=team, start=start)

    def run(self) -> int:
        """Run the whole loop, or the evaluation of a config that has nothing to train on. Return the step at which it
        ended.

        Raises:
            YattError: the error that ended the run early, after the other controllers were told.
        """
        try:
            step = (train if self._controller.config.trains else evaluate)(self._controller)
        # this is the edge of the process, and the other controllers must not wait for this one
        except Exception as error:
            with contextlib.suppress(YattError):  # the rendezvous may be gone; the first error says more
                self._controller.abort(f"{type(error).__name__}: {error}")
            raise
        _check_nothing_heavy_was_held()
        return step


def _check_nothing_heavy_was_held() -> None:
    """Raise if this process imported a module that works with pixels (such as torch), or maps a segment of the data
    plane."""
    loaded = [name for name in FORBIDDEN_MODULES if name in sys.modules]
    assert not loaded, f"a controller imported {loaded}"
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in maps if SEGMENT_MARK in line]
    assert not mapped, f"a controller maps segments of the data plane: {mapped}"
