"""The tools that every path is measured with: the payloads, the clock, and helper processes.

The payloads of a case are random bytes that follow from its seed, so each process makes the same ones by itself.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

MIN_REPEATS, MAX_REPEATS = 7, 40
BUDGET_S = 1.0
"""The time in seconds for which a path is repeated, within the bounds above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A set of objects that are handled in one call."""

    label: str
    shapes: tuple[tuple[int, ...], ...]
    """The number of bytes of each object; all objects are uint8."""
    seed: int = 0

    @property
    def count(self) -> int:
        """The number of objects."""
        return len(self.shapes)

    @property
    def total_bytes(self) -> int:
        """The number of bytes of all objects."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def is_uniform(self) -> bool:
        """True if all objects have one shape."""
        return len(set(self.shapes)) == 1

    def first(self) -> Case:
        """Return the same case with only its first object."""
        return Case(label=self.label, shapes=self.shapes[:1], seed=self.seed)

    def payloads(self) -> list[np.ndarray]:
        """Return the objects: random bytes, which cannot be compressed, each aligned to at least 64 bytes."""
        sizes = [math.prod(shape) for shape in self.shapes]
        starts = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])
        words = np.random.default_rng(self.seed).integers(0, 1 << 64, int(starts[-1]) // 8 + 8, dtype=np.uint64)
        data = words.view(np.uint8)
        skip = -data.ctypes.data % 64
        return [
            data[skip + start : skip + start + size].reshape(shape)
            for start, size, shape in zip(starts.tolist(), sizes, self.shapes, strict=False)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row: the median time of a call that handles all objects of a case."""

    path: str
    case: Case
    seconds: float
    repeats: int

    def to_row(self) -> dict[str, Any]:
        """Return the row for programs; `bytes` is the mean over the objects."""
        case = self.case
        size = round(case.total_bytes / case.count)
        return {"path": self.path, "bytes": size, "count": case.count, "seconds": self.seconds}


def measure(
    path: str,
    case: Case,
    work: Callable[[Any], object],
    *,
    prepare: Callable[[], Any] = lambda: None,
    clean: Callable[[Any], object] = lambda given: None,
    quick: bool = False,
) -> Measured:
    """Time `work(given)` and return the row. Before each call, `prepare` makes `given`; after it, `clean` removes it.
    Both are not timed.

    The first call is not counted: it opens connections and faults pages in.
    """
    seconds: list[float] = []
    started = time.monotonic()
    gc.collect()
    for turn in range(4 if quick else MAX_REPEATS + 1):
        given = prepare()
        before = time.perf_counter()
        result = work(given)
        elapsed = time.perf_counter() - before
        del result
        clean(given)
        if turn:
            seconds.append(elapsed)
        if turn >= MIN_REPEATS and time.monotonic() - started > BUDGET_S:
            break
    return Measured(path=path, case=case, seconds=statistics.median(seconds), repeats=len(seconds))


class Helper:
    """A process that serves requests one after the other. It ends when its owner closes it or dies."""

    def __init__(self, serve: Callable[[Connection], None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The id of the helper's process."""
        return self._process.pid or 0

    def ask(self, verb: str, *args: Any) -> Any:
        """Send a request to the helper and return its reply."""
        self.pipe.send((verb, *args))
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """End the helper's process."""
        self.pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextmanager
def helper(serve: Callable[..., None], *args: Any) -> Iterator[Helper]:
    """Run a helper process during a `with` block, and yield its `Helper`. `serve` is its main function, with a pipe and
    `args`."""
    running = Helper(serve, *args)
    try:
        yield running
    finally:
        running.stop()


def requests(pipe: Connection) -> Iterator[Sequence[Any]]:
    """Yield the requests of the owner, until it closes the pipe or dies."""
    while True:
        try:
            yield pipe.recv()
        except (EOFError, OSError):
            return
