"""The counters of a node's calls: per verb the number, the latency and the errors; also bytes, hits and misses.

They are plain counters behind one lock. Counting a call takes about a microsecond. `prometheus.py` turns the counters
into the text that Prometheus reads.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow.flight as fl

from dataplane.core.errors import DataPlaneError

BOUNDS_S: Sequence[float] = tuple(round(10 ** (power / 4), 7) for power in range(-20, 9))
"""The upper bounds of the latency buckets in seconds: four per decade, 10 µs to 100 s."""


@dataclass(slots=True)
class VerbCounts:
    """The counters of one verb."""

    num_calls: int = 0
    num_errors: int = 0
    total_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """The numbers of calls by latency: one per bound, and one for longer calls."""

    def quantile_s(self, share: float) -> float:
        """Return the latency in seconds below which this share of the calls stayed. A bucket's width, a factor of 1.8,
        limits the precision."""
        wanted, seen = share * self.num_calls, 0
        for at, count in enumerate(self.buckets):
            if count and seen + count >= wanted:
                low = BOUNDS_S[at - 1] if at else 0.0
                high = BOUNDS_S[at] if at < len(BOUNDS_S) else 2 * BOUNDS_S[-1]
                return low + (high - low) * (wanted - seen) / count
            seen += count
        return 0.0


class Meter:
    """The counters of one node. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # finalisers count too, and they run in any thread
        self._verbs: defaultdict[str, VerbCounts] = defaultdict(VerbCounts)
        self._errors: Counter[str] = Counter()
        self._open: Counter[str] = Counter()
        self._received_bytes = 0
        self._sent_bytes = 0
        self._num_hits = 0
        self._num_misses = 0

    @contextmanager
    def call(self, verb: str) -> Iterator[None]:
        """Time one call of a verb. An error is counted by kind and raised again."""
        started = time.perf_counter()
        kind = ""
        try:
            yield
        except BaseException as error:
            kind = error_kind(error)
            raise
        finally:
            self.count_call(verb, time.perf_counter() - started, kind)

    @contextmanager
    def stream(self, verb: str) -> Iterator[None]:
        """Count a stream as open, and count the error that ends it. Its requests are timed one by one, as calls."""
        with self._lock:
            self._open[verb] += 1
        try:
            yield
        except BaseException as error:
            self.count_error(verb, error_kind(error))
            raise
        finally:
            with self._lock:
                self._open[verb] -= 1

    def count_call(self, verb: str, seconds: float, kind: str = "") -> None:
        """Count a call with its time and the kind of error that it ended with."""
        at = bisect_left(BOUNDS_S, seconds)
        with self._lock:
            counts = self._verbs[verb]
            counts.num_calls += 1
            counts.total_s += seconds
            counts.buckets[at] += 1
            if kind:
                counts.num_errors += 1
                self._errors[kind] += 1

    def count_error(self, verb: str, kind: str) -> None:
        """Count an error outside of any timed call: a stream that broke, or a caller that was refused."""
        with self._lock:
            self._verbs[verb].num_errors += 1
            self._errors[kind] += 1

    def count_bytes(self, *, received: int = 0, sent: int = 0) -> None:
        """Count bytes of objects that crossed a connection. Bytes that readers map, or that writers write in place, are
        not counted."""
        with self._lock:
            self._received_bytes += received
            self._sent_bytes += sent

    def count_found(self, num_hits: int, num_misses: int) -> None:
        """Count objects that a resolve asked for: resident ones are hits, the others are misses."""
        with self._lock:
            self._num_hits += num_hits
            self._num_misses += num_misses

    def verbs(self) -> dict[str, VerbCounts]:
        """Return a copy of every verb's counters."""
        with self._lock:
            return {
                verb: VerbCounts(found.num_calls, found.num_errors, found.total_s, list(found.buckets))
                for verb, found in sorted(self._verbs.items())
            }

    def stat(self) -> dict[str, Any]:
        """Return all counters as numbers, for `stat`."""
        verbs = {
            verb: {
                "num_calls": counts.num_calls,
                "num_errors": counts.num_errors,
                "total_s": round(counts.total_s, 6),
                "p50_s": round(counts.quantile_s(0.5), 7),
                "p99_s": round(counts.quantile_s(0.99), 7),
            }
            for verb, counts in self.verbs().items()
        }
        with self._lock:
            return {
                "num_hits": self._num_hits,
                "num_misses": self._num_misses,
                "received_bytes": self._received_bytes,
                "sent_bytes": self._sent_bytes,
                "num_streams": sum(self._open.values()),
                "streams": {verb: count for verb, count in self._open.items() if count},
                "errors": dict(self._errors),
                "verbs": verbs,
            }


def error_kind(error: BaseException) -> str:
    """Return the name of an error for the counters: the class name of an error of the data plane; any other error is a
    broken stream or unexpected."""
    if isinstance(error, DataPlaneError):
        return type(error).__name__
    return "broken stream" if isinstance(error, fl.FlightError) else "bug"
