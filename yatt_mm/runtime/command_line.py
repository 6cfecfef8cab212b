"""What the commands that start processes have in common: interruptions, errors, and the exit status."""

from __future__ import annotations

import argparse
import atexit
import sys
from collections.abc import Callable

from yatt_mm.common.streams import outliving_streams


def config_parser(prog: str, *, description: str, examples: str, override: str) -> argparse.ArgumentParser:
    """Return the parser of a command that takes a config and overrides of its keys. `examples`: whole command lines.
    `override`: an example of an override."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="YAML file of the run (see configs/ and docs/configuration.md)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"dotted overrides, for example {override}")
    return parser


def status_of(act: Callable[[], object], *, stopped: str, loses_nothing: bool = False) -> int:
    """Do what a command does, and return its exit status: 0, 1 if a part failed, 2 if the config is wrong, 75 if it was
    told to stop and lost nothing, 130 if it was interrupted.

    `stopped`: what has been stopped after an interruption, for people. `loses_nothing`: True if nothing is lost when
    SIGTERM or SIGHUP interrupts the command.
    """
    from yatt_mm.runtime.signals import (
        INTERRUPTED,
        SAVED_AND_STOPPED,
        ending_signals_interrupt,
        ignore_signals,
        interrupted_by_people,
    )

    with outliving_streams():
        try:
            with ending_signals_interrupt():
                return _status_of(act)
        except KeyboardInterrupt:
            print(f"interrupted; {stopped} has been stopped", file=sys.stderr)
            return SAVED_AND_STOPPED if loses_nothing and not interrupted_by_people() else INTERRUPTED
        finally:
            atexit.register(ignore_signals)  # Python's own end takes a moment


def _status_of(act: Callable[[], object]) -> int:
    from yatt_mm.preflight.packages import check_packages_are_ours

    check_packages_are_ours()
    from dataplane.core.errors import DataPlaneError
    from yatt_mm.common.errors import ConfigError, RunStopped, YattError
    from yatt_mm.runtime.signals import SAVED_AND_STOPPED

    try:
        act()
    except RunStopped as stop:
        print(stop, file=sys.stderr)
        return SAVED_AND_STOPPED
    except (YattError, DataPlaneError) as error:
        print(f"error: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
