"""The processes that an engine started: known by handle from the moment they exist, ended within a deadline."""

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
    """Every descendant of this process that is alive."""
    return set(psutil.Process().children(recursive=True))


def watch(processes: set[psutil.Process], on_death: Callable[[int], None]) -> Callable[[], None]:
    """Call `on_death` with the process id when one ends; the kernel tells, nothing is polled.

    Belongs to the running event loop. Returns what stops the watching.
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
    """Files whose path begins with `prefix` and that any of the processes maps."""
    paths: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            paths |= {Path(area.path) for area in process.memory_maps() if area.path.startswith(prefix)}
    return paths


def end(processes: set[psutil.Process], timeout_s: float) -> None:
    """Wait for `processes` to end, ask the rest to, kill what does not listen; each step has a third of the time."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s / 3)
    for action in (psutil.Process.terminate, psutil.Process.kill):
        for process in alive:
            logger.warning("process %d (%s) outlived its engine: %s", process.pid, _name(process), action.__name__)
            try:
                action(process)
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(alive, timeout=timeout_s / 3)
    if alive:
        logger.error("processes %s could not be ended", sorted(process.pid for process in alive))


def ask_to_end(processes: set[psutil.Process]) -> None:
    """Send SIGTERM to those that are still there; returns at once."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()


def tracker_pid() -> int | None:
    """Process id of multiprocessing's resource tracker, which the first spawned child brings along."""
    return resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]


def stop_tracker() -> None:
    """End the resource tracker; Python starts another when one is needed."""
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "gone"
