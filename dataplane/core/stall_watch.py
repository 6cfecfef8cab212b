"""Cutting Flight streams on which nothing comes any more: a connection can be dead for minutes without a sign."""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow.flight as fl


class StallWatch:
    """Cuts streams on which nothing came for `stall_s`; with infinity it cuts none. Thread-safe."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._lock = threading.Lock()
        self._last: dict[int, tuple[fl.FlightStreamReader, float]] = {}
        self._wake = threading.Event()
        self._is_closed = False
        if stall_s < math.inf:
            threading.Thread(target=self._keep, name="watch", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._wake.set()

    @contextmanager
    def over(self, reader: fl.FlightStreamReader) -> Iterator[None]:
        """Watch a stream; `seen` says that something came."""
        self.seen(reader)
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                del self._last[id(reader)]

    def seen(self, reader: fl.FlightStreamReader) -> None:
        """Something came on this stream just now."""
        with self._lock:
            self._last[id(reader)] = (reader, time.monotonic())

    def _keep(self) -> None:
        """Waits for: streams to watch; ends with `close`."""
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
