"""Measures what processes use: resident memory, sampled while something runs, and processor time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

SAMPLE_EVERY_S = 0.1


def family(pid: int) -> list[int]:
    """Return a process and all of its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def cpu_s(pids: Sequence[int]) -> float:
    """Return the processor time in seconds that these processes have spent, including time in system calls."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


@contextmanager
def watched(pid: int) -> Iterator[dict[str, int]]:
    """Measure the largest memory of a node during a `with` block. Yield a dictionary that is kept up to date, in
    bytes: `all` with the node's workers, `node` alone."""
    peak = {"all": 0, "node": 0}
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            fields = [_memory(member) for member in family(pid)]
            shared = _memory(os.getpid()).get("Pss_Shmem", 0)  # this reader's part of the arena
            peak["all"] = max(peak["all"], shared + sum(member.get("Pss", 0) for member in fields))
            peak["node"] = max(peak["node"], fields[0].get("Rss", 0))
            ended.wait(SAMPLE_EVERY_S)

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join(timeout=10)


def _memory(pid: int) -> dict[str, int]:
    """Return the fields of smaps_rollup in bytes; empty for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {name: int(value.split()[0]) << 10 for name, value in (line.split(":") for line in lines)}
