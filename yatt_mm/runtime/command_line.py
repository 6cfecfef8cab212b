"""What the commands that start processes have in common: interruptions, errors, and the exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable


def status_of(act: Callable[[], object], *, stopped: str) -> int:
    """Do what a command does, and return its exit status: 0, 1 if a part failed, 2 if the config is wrong, 130 if it
    was interrupted. `stopped`: what has been stopped after an interruption, for people."""
    from yatt_mm.runtime.signals import ending_signals_interrupt

    try:
        with ending_signals_interrupt():
            return _status_of(act)
    except KeyboardInterrupt:
        print(f"interrupted; {stopped} has been stopped", file=sys.stderr)
        return 130


def _status_of(act: Callable[[], object]) -> int:
    from yatt_mm.runtime.packages import check_packages_are_ours

    check_packages_are_ours()
    from dataplane.core.errors import DataPlaneError
    from yatt_mm.common.errors import ConfigError, YattError

    try:
        act()
    except (YattError, DataPlaneError) as error:
        print(f"error: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
