"""Cancel Flight streams that stopped sending data. Without this, a dead connection can stay unnoticed for minutes."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow.flight as fl


class StallWatch:
    """Cancels every watched stream on which no data came for `stall_s` seconds. It is thread-safe.

    If `stall_s` is infinite, it cancels no stream and starts no thread.
    """

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._lock = threading.Lock()
        self._last: dict[int, tuple[fl.FlightStreamReader, float]] = {}
        self._wake = threading.Event()
        self._is_closed = False
        if stall_s < math.inf:
            threading.Thread(target=self._keep, name="watch", daemon=True).start()

    def close(self) -> None:
        """Stop the thread; streams are not watched any more."""
        self._is_closed = True
        self._wake.set()

    @contextmanager
    def over(self, reader: fl.FlightStreamReader) -> Iterator[None]:
        """Watch a stream during the `with` block. The caller calls `seen` each time data came."""
        self.seen(reader)
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                del self._last[id(reader)]

    def seen(self, reader: fl.FlightStreamReader) -> None:
        """Note that data came on this stream now."""
        with self._lock:
            self._last[id(reader)] = (reader, time.monotonic())

    def _keep(self) -> None:
        """Cancel stalled streams until `close`. While there are none to watch, wait for a stream."""
        while not self._is_closed:
            with self._lock:
                streams = list(self._last.values())
            if not streams:
                self._wake.wait()
                self._wake.clear()
                continue
            now = time.monotonic()
            for reader, last in streams:
                if now - last > self.stall_s:
                    reader.cancel()
            time.sleep(min(1.0, self.stall_s / 4))
