"""The limits on what clients may ask for at once. A request beyond a limit gets an error that names it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dataplane.core.errors import BadRequestError, OverloadedError


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The limits of a node on the load that its clients may cause."""

    max_calls: int = 1024
    """The maximum number of DoGet, DoPut and DoAction calls at the same time."""
    max_streams: int = 4096
    """The maximum number of DoExchange streams at the same time. Every reader holds two or more, every writer one."""
    max_leases: int = 1 << 20
    """The maximum number of leases of all readers together. The node keeps about 300 bytes for each."""
    max_message_bytes: int = 256 << 20
    """The maximum size in bytes of one record batch of a DoPut."""

    def check(self) -> None:
        """Raise BadRequestError if a node could not work with these limits."""
        for name, value, least in (
            ("max-calls", self.max_calls, 1),
            ("max-streams", self.max_streams, 2),
            ("max-leases", self.max_leases, 1),
            ("max-message", self.max_message_bytes, 8 << 20),
        ):
            if value < least:
                raise BadRequestError(f"{name} is {value}; wanted at least {least}")

    def check_leases(self, num_leases: int, num_asked: int) -> None:
        """Raise OverloadedError if a node that has granted `num_leases` may not grant `num_asked` more."""
        if num_leases + num_asked > self.max_leases:
            raise OverloadedError(
                f"this node has {num_leases} leases and was asked for {num_asked} more, {self.max_leases} are its "
                "limit; drop views, ask for less at once, or start it with a higher --max-leases"
            )


class ByteBudget:
    """A budget for the bytes of requests that are being served. Thread-safe. Small requests are not counted."""

    def __init__(self, limit: int, least: int) -> None:
        self._limit = limit
        self._least = least
        self._lock = threading.RLock()  # finalisers give bytes back, and they run in any thread
        self._num_taken = 0

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """Take `nbytes` of the budget during a `with` block. Raises OverloadedError at once if they are not free."""
        self.take(nbytes)
        try:
            yield
        finally:
            self.give_back(nbytes)

    def take(self, nbytes: int) -> None:
        """Take `nbytes` of the budget until `give_back`. Raises OverloadedError at once if they are not free."""
        if nbytes < self._least:
            return
        with self._lock:
            if self._num_taken + nbytes > self._limit:
                raise OverloadedError(
                    f"this node is answering requests of {self._num_taken} bytes and got one of {nbytes} more, "
                    f"{self._limit} are its limit; try again later, or ask for less at once"
                )
            self._num_taken += nbytes

    def give_back(self, nbytes: int) -> None:
        """Give back bytes that `take` took."""
        if nbytes >= self._least:
            with self._lock:
                self._num_taken -= nbytes


BODIES = ByteBudget(128 << 20, 64 << 10)
"""The budget for the JSON bodies of this process's callers. A parsed body may take twenty times its size."""


class Slots:
    """A fixed number of slots for what happens at the same time, such as calls or streams. Thread-safe."""

    def __init__(self, limit: int, what: str, flag: str = "") -> None:
        self._limit = limit
        self._what = what
        self._flag = flag
        self._lock = threading.RLock()  # finalisers give slots back, and they run in any thread
        self._num_taken = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Take one slot during a `with` block. Raises OverloadedError at once if none is free."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def take(self) -> None:
        """Take one slot until `give_back`. Raises OverloadedError at once if none is free."""
        with self._lock:
            if self._num_taken >= self._limit:
                more = f", or start it with a higher {self._flag}" if self._flag else ""
                raise OverloadedError(
                    f"this node has {self._num_taken} {self._what} open, as many as it may; close some, try again "
                    f"later{more}"
                )
            self._num_taken += 1

    def give_back(self) -> None:
        """Give back a slot that `take` took."""
        with self._lock:
            self._num_taken -= 1
