"""A thread-safe cache with a limit on the total cost of its values. The least recently used value is dropped first."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """A cache whose values together cost at most `max_cost`. A value that costs more than `max_cost` is not kept.

    The caller chooses the unit of cost, for example bytes.
    """

    def __init__(self, max_cost: int) -> None:
        self._max_cost = max_cost
        self._cost = 0
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def cost(self) -> int:
        """The total cost of the values in the cache."""
        return self._cost

    def get(self, key: Hashable) -> Value | None:
        """Return the value of a key and mark it as the most recently used; None if the cache does not have it."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def take(self, key: Hashable) -> Value | None:
        """Remove the value of a key and return it; None if the cache does not have it."""
        with self._lock:
            entry = self._entries.get(key)
            self._drop(key)
            return entry[0] if entry is not None else None

    def put(self, key: Hashable, value: Value, cost: int = 1) -> None:
        """Store a value, and drop the least recently used values while the total cost is above the limit."""
        with self._lock:
            self._drop(key)
            if cost > self._max_cost:
                return
            self._entries[key] = (value, cost)
            self._cost += cost
            while self._cost > self._max_cost:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: Hashable) -> None:
        """Remove a value, if the cache has it. The caller holds the lock."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._cost -= entry[1]
