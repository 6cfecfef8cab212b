"""Scopes: named groups of objects that end together, such as those of a step or an epoch. Each scope has a quota.

Bookkeeping only; the store's lock guards it. An object may be in several scopes and counts in each. Which clients keep
a scope open is in `dataplane/server/scope_owners.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dataplane.core.errors import BadRequestError, MissingObjectError, OutOfSpaceError
from dataplane.core.units import format_bytes

MAX_SCOPES = 10_000


@dataclass(slots=True, eq=False)
class Scope:
    """An open scope."""

    name: str
    quota_bytes: int | None
    """The quota in bytes. With None, only the node's memory limits the scope."""
    owners: set[str] = field(default_factory=set)
    """The clients that opened the scope. When the last of them is gone the scope closes."""
    used_bytes: int = 0
    """The bytes of its objects and of the slabs that are being written for it."""
    members: set[str] = field(default_factory=set)
    """The names of its objects."""
    is_open: bool = True

    def reserve(self, nbytes: int) -> None:
        """Count bytes against the quota. The caller has asked `has_room`, or counts an object that exists."""
        self.used_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """Stop counting `nbytes` bytes in the scope's quota."""
        self.used_bytes -= nbytes

    def has_room(self, nbytes: int) -> bool:
        """Return True if `nbytes` more stay within the quota."""
        return self.quota_bytes is None or self.used_bytes + nbytes <= self.quota_bytes

    def check_ever_fits(self, nbytes: int) -> None:
        """Raise OutOfSpaceError if the whole quota is too small."""
        if self.quota_bytes is not None and nbytes > self.quota_bytes:
            raise OutOfSpaceError(self.describe_shortage(nbytes))

    def describe_shortage(self, nbytes: int) -> str:
        """Return the sentence for an error that says why the quota has no room for `nbytes` more."""
        return (
            f"scope {self.name!r} has no room for {format_bytes(nbytes)}: wanted_bytes={nbytes} "
            f"used_bytes={self.used_bytes} quota_bytes={self.quota_bytes}; release objects of it, or open it "
            "with a larger quota"
        )


class Scopes:
    """The open scopes of a node, by name."""

    def __init__(self) -> None:
        self._scopes: dict[str, Scope] = {}

    def __len__(self) -> int:
        return len(self._scopes)

    def open(self, name: str, quota_bytes: int | None, owners: Iterable[str]) -> Scope:
        """Open a scope and return it. If it is open with the same quota, `owners` join it.

        `owners`: the ids of the clients that open it. `quota_bytes`: None sets no limit. Raises BadRequestError if the
        scope is open with another quota, or if too many scopes are open.
        """
        scope = self._scopes.get(name)
        if scope is None:
            if len(self._scopes) >= MAX_SCOPES:
                raise BadRequestError(f"{MAX_SCOPES} scopes are open; close some before {name!r}")
            scope = self._scopes[name] = Scope(name, quota_bytes)
        elif scope.quota_bytes != quota_bytes:
            raise BadRequestError(
                f"scope {name!r} is open with quota_bytes={scope.quota_bytes}, asked for was {quota_bytes}: close it "
                "first, or ask for the same"
            )
        scope.owners.update(owners)
        return scope

    def find(self, name: str) -> Scope:
        """Return the open scope of this name. MissingObjectError if there is none."""
        scope = self._scopes.get(name)
        if scope is None:
            raise MissingObjectError(
                f"scope {name!r} is not open on this node: it was never opened, was closed, or its client was gone for "
                "too long; open it with open_scope"
            )
        return scope

    def close(self, name: str) -> Scope:
        """Remove a scope from the table and return it. The caller handles its objects."""
        scope = self.find(name)
        del self._scopes[name]
        scope.is_open = False
        return scope

    def leave(self, owner: str) -> list[Scope]:
        """Note that `owner` is gone. Return the scopes that are now without a client and must be closed."""
        orphans = []
        for scope in self._scopes.values():
            if owner in scope.owners:
                scope.owners.discard(owner)
                if not scope.owners:
                    orphans.append(scope)
        return orphans
