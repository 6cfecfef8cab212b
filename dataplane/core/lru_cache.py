"""A cache with a bound on what it may cost; what was used least recently goes first. Thread-safe."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Values by key, of at most `max_cost` together; a value that costs more than that is not kept."""

    def __init__(self, max_cost: int) -> None:
        self._max_cost = max_cost
        self._cost = 0
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def cost(self) -> int:
        """What is kept now."""
        return self._cost

    def get(self, key: Hashable) -> Value | None:
        """The value, which is then the last to go; None if it is not here."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: Value, cost: int = 1) -> None:
        """Keep a value, in the place of others where need be."""
        with self._lock:
            self._drop(key)
            if cost > self._max_cost:
                return
            self._entries[key] = (value, cost)
            self._cost += cost
            while self._cost > self._max_cost:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._cost -= entry[1]
