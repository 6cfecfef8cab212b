"""Leases with an expiry time, for Flight clients that hold no stream.

A timed lease keeps its object in place. After the expiry the object may be evicted again; a DoGet that is still
streaming has its own lease.
"""

import heapq
import logging
import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass

from dataplane.core.errors import BadRequestError, MissingObjectError, OverloadedError
from dataplane.storage.entries import Entry, Leased
from dataplane.storage.store import Store

DEFAULT_S = 60.0
MAX_S = 3600.0
MAX_OFFERS = 65_536
MAX_SHARE = 0.25
"""The share of the node's memory that timed leases may keep, because their clients need not be connected."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _TimedLease:
    leased: Leased
    expires: float
    """The expiry time in seconds since the epoch."""


class TimedLeases:
    """The timed leases of a node. Thread-safe; its own thread ends them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.session = f"offers-{secrets.token_hex(16)}"
        """The store's session of all timed leases; a secret."""
        store.open_session(self.session, is_reader=False)
        self._changed = threading.Condition()
        self._offers: dict[str, _TimedLease] = {}
        self._heap: list[tuple[float, str]] = []
        self._entries: Counter[Entry] = Counter()
        self._kept_bytes = 0
        self._max_bytes = int(store.segment.capacity * MAX_SHARE)
        self._is_closed = False
        self._thread = threading.Thread(target=self._expire, name="offers", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, leased: Leased, lease_s: float) -> tuple[str, float]:
        """Take over a lease of `session` for `lease_s` seconds. Return its secret name and its expiry time."""
        with self._changed:
            if len(self._offers) >= MAX_OFFERS:
                raise OverloadedError(
                    f"this node has {MAX_OFFERS} timed leases; let some expire, or end them (renew, 0 s)"
                )
            self._check_bytes(leased.entry)
            self._kept_bytes += 0 if leased.entry in self._entries else leased.entry.ref.nbytes
            self._entries[leased.entry] += 1
            name = secrets.token_hex(16)
            self._offers[name] = _TimedLease(leased, time.time() + lease_s)
            self._push(name)
            return name, self._offers[name].expires

    def lease_again(self, name: str) -> Leased | None:
        """Return a lease of the node itself on the object, even if its name was released. None if the timed lease has
        ended."""
        with self._changed:
            offer = self._offers.get(name)
            return self._store.lease_entry(offer.leased.entry) if offer is not None else None

    def renew(self, name: str, lease_s: float) -> float:
        """Extend a timed lease to `lease_s` seconds from now; 0 ends it. MissingObjectError if it has ended already."""
        with self._changed:
            offer = self._offers.get(name)
            if offer is None:
                raise MissingObjectError(
                    f"lease {name[:40]!r} has expired, or never was; ask GetFlightInfo for a new one"
                )
            offer.expires = time.time() + lease_s
            self._push(name)
            return offer.expires

    def close(self) -> None:
        """Stop the thread. The leases end with the store."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout=5)

    def _check_bytes(self, entry: Entry) -> None:
        """Raise OverloadedError if timed leases would keep too much. One object of any size is always allowed."""
        kept = self._kept_bytes
        if self._entries and entry not in self._entries and kept + entry.ref.nbytes > self._max_bytes:
            raise OverloadedError(
                f"timed leases keep {kept} bytes and were asked to keep {entry.ref.nbytes} more, {self._max_bytes} (a "
                "quarter of the node's memory) are their limit; let some expire, end them (renew, 0 s), or use a Reader"
            )

    def _forget(self, name: str) -> int:
        """Remove an ended timed lease from the table and return its lease."""
        leased = self._offers.pop(name).leased
        self._entries[leased.entry] -= 1
        if not self._entries[leased.entry]:
            del self._entries[leased.entry]
            self._kept_bytes -= leased.entry.ref.nbytes
        return leased.lease

    def _push(self, name: str) -> None:
        if len(self._heap) > 2 * len(self._offers) + 64:  # most entries are old times of leases that were renewed
            self._heap = [(offer.expires, other) for other, offer in self._offers.items()]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self._offers[name].expires, name))
        self._changed.notify()

    def _expire(self) -> None:
        """End leases when they expire. Waits for: the earliest expiry, a change, or `close`."""
        with self._changed:
            while not self._is_closed:
                due = []
                now = time.time()
                while self._heap and self._heap[0][0] <= now:
                    _, name = heapq.heappop(self._heap)
                    offer = self._offers.get(name)
                    if offer is not None and offer.expires <= now:  # otherwise it was renewed meanwhile
                        due.append(self._forget(name))
                if due:
                    self._store.end_leases(due, self.session)
                self._changed.wait(max(0.0, self._heap[0][0] - now) if self._heap else None)


def check_lease_s(lease_s: float, least: float = 0.0) -> float:
    """Check how long a timed lease may last, and return the seconds."""
    if not least <= lease_s <= MAX_S:
        raise BadRequestError(f"lease_s is {lease_s}; wanted {least:g} to {MAX_S:g} seconds; renew it for longer")
    return float(lease_s)
