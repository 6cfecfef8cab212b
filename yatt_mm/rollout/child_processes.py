"""Child processes of an engine: find them, watch for their death, and end them.

`psutil.Process` handles are used instead of process ids, so a reused id is never ended by mistake.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)


def children() -> set[psutil.Process]:
    """Return all living descendants of this process."""
    return set(psutil.Process().children(recursive=True))


def watch(processes: set[psutil.Process], on_death: Callable[[int], None]) -> Callable[[], None]:
    """Call `on_death` with the process id when one of the processes ends; return a function that stops the watching.

    The system reports the end through the running event loop; there is no polling.
    """
    loop = asyncio.get_running_loop()
    pidfds = {process.pid: os.pidfd_open(process.pid) for process in processes}

    def report(pid: int) -> None:
        loop.remove_reader(pidfds[pid])
        on_death(pid)

    def stop() -> None:
        for pidfd in pidfds.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)

    for pid, pidfd in pidfds.items():
        loop.add_reader(pidfd, report, pid)
    return stop


def mapped(processes: set[psutil.Process], prefix: str) -> set[Path]:
    """Return the files that any of the processes maps and whose path begins with `prefix`."""
    paths: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            paths |= {Path(area.path) for area in process.memory_maps() if area.path.startswith(prefix)}
    return paths


def kill(processes: set[psutil.Process]) -> None:
    """Send SIGKILL to the processes that are still alive, without waiting for their end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def wait_for_end(processes: set[psutil.Process], timeout_s: float) -> None:
    """Wait until killed processes have ended. Those that do not end in time are logged."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    if alive:
        logger.error("processes do not end, not even with SIGKILL: %s", sorted(process.pid for process in alive))


def tracker_pid() -> int | None:
    """Return the process id of multiprocessing's resource tracker; None before the first spawned child starts it."""
    return resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]


def stop_tracker() -> None:
    """End multiprocessing's resource tracker. Python starts a new one when it needs one."""
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
