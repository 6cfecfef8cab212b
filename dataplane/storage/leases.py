"""The table of leases: grants them and ends them, one by one or all of a session (a reader's open stream).

Bookkeeping only; the store's lock guards it. A lease keeps one object where it is. The calls come from
`dataplane/server`: streams end their leases in `do_exchange.py`, and a DoGet ends its own in `do_get.py`.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Leases(Generic[T]):
    """Counts the leases of each target, and finds the leases of a session that ended."""

    def __init__(self) -> None:
        self._leases: dict[int, tuple[T, str]] = {}
        """The target and session of each lease, by number."""
        self._by_session: dict[str, set[int]] = {}
        self._counts: dict[T, int] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_sessions(self) -> int:
        """The number of open sessions, with or without leases."""
        return len(self._by_session)

    def targets(self) -> Iterable[T]:
        """Return every target with at least one lease."""
        return self._counts.keys()

    def targets_of(self, session: str) -> set[T]:
        """Return every target with at least one lease of a session, which need not be open."""
        return {self._leases[number][0] for number in self._by_session.get(session, ())}

    def open_session(self, session: str) -> None:
        """Open a session, to which leases can then belong."""
        self._by_session[session] = set()

    def has_session(self, session: str) -> bool:
        """Return True if the session is open."""
        return session in self._by_session

    def count(self, target: T) -> int:
        """Return how many leases keep `target` in place."""
        return self._counts.get(target, 0)

    def grant(self, target: T, session: str) -> int:
        """Return a new lease on `target`. It ends with `session` at the latest."""
        return self.grant_all([target], session)[0]

    def grant_all(self, targets: Sequence[T], session: str) -> Sequence[int]:
        """Grant one lease per target, and return them in order."""
        numbers = range(self._next, self._next + len(targets))
        self._next += len(targets)
        self._by_session[session].update(numbers)
        for number, target in zip(numbers, targets, strict=True):
            self._leases[number] = target, session
            self._counts[target] = self._counts.get(target, 0) + 1
        return numbers

    def end(self, leases: Iterable[int], session: str) -> list[T]:
        """End those of `leases` that belong to `session`; return the targets that have no lease any more."""
        freed = []
        for number in leases:
            target, owner = self._leases.get(number, (None, ""))
            if target is None or owner != session:
                continue
            del self._leases[number]
            self._by_session[session].discard(number)
            self._counts[target] -= 1
            if not self._counts[target]:
                del self._counts[target]
                freed.append(target)
        return freed

    def end_session(self, session: str) -> list[T]:
        """End a session with all its leases; return the targets that have no lease any more."""
        freed = self.end(list(self._by_session.get(session, ())), session)
        self._by_session.pop(session, None)
        return freed
