"""Keeps track of connected clients, and closes the scopes of clients that are gone.

A scope belongs to the clients that opened it. Each of these clients holds a stream. When the stream breaks, the client
has a grace period to come back; then its scopes close.
"""

import logging
import threading
import time
from functools import partial

from dataplane.core.timers import TIMERS, Timer
from dataplane.storage.store import Store

GRACE_S = 30.0
"""The time in seconds that a client may take to come back after its stream broke."""

log = logging.getLogger(__name__)


class ScopeOwners:
    """The clients that keep scopes open. Thread-safe."""

    def __init__(self, store: Store, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self._store = store
        self._lock = threading.Lock()
        self._num_streams: dict[str, int] = {}
        self._timers: dict[str, Timer] = {}
        self._is_closed = False

    def arrive(self, owner: str) -> None:
        """Note that a stream of this client is open."""
        with self._lock:
            self._num_streams[owner] = self._num_streams.get(owner, 0) + 1
            self._cancel(owner)

    def depart(self, owner: str, *, is_final: bool) -> None:
        """Note that a stream of this client ended. If `is_final`, the client is finished; otherwise it may come
        back."""
        with self._lock:
            self._num_streams[owner] -= 1
            if self._num_streams[owner]:
                return
            del self._num_streams[owner]
        if is_final:
            self._end(owner)
        else:
            self.expect(owner)

    def expect(self, owner: str) -> None:
        """Close the scopes of a client, unless it is connected or comes back within the grace period."""
        with self._lock:
            if self._is_closed or owner in self._num_streams or owner in self._timers:
                return
            self._timers[owner] = TIMERS.start(time.monotonic() + self.grace_s, partial(self._end_later, owner))

    def close(self) -> None:
        """Stop all timers; no scope is closed any more."""
        with self._lock:
            self._is_closed = True
            for owner in list(self._timers):
                self._cancel(owner)

    def _cancel(self, owner: str) -> None:
        timer = self._timers.pop(owner, None)
        if timer is not None:
            TIMERS.cancel(timer)

    def _end_later(self, owner: str) -> None:
        """Close the scopes in another thread, because that may remove files, and the thread of the timers must not
        wait."""
        threading.Thread(target=self._end, args=(owner,), name="scope-owners", daemon=True).start()

    def _end(self, owner: str) -> None:
        with self._lock:
            self._cancel(owner)
            if self._is_closed or owner in self._num_streams:
                return
        names = self._store.scopes.leave(owner)
        if names:
            log.warning("closed %d scope(s) of a client that is gone: %s", len(names), ", ".join(names)[:200])
