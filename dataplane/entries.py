"""What the store keeps of an object: where it lies, and why it may not go."""

from dataclasses import dataclass, field

from dataplane.allocator import slab_bytes
from dataplane.refs import Ref
from dataplane.scopes import Scope


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """A place in the arena; seal it or give it up."""

    offset: int
    nbytes: int
    scope: Scope | None = None
    """Whose quota its bytes count in while it is written; what is sealed in it joins that scope."""


@dataclass(slots=True, eq=False)
class Entry:
    """A sealed object."""

    ref: Ref
    slab: Slab
    is_held: bool
    """Somebody put it by hand, outside of any scope: it stays until it is released."""
    digest: str = ""
    """Of its content, where it is known; else empty."""
    scopes: set[Scope] = field(default_factory=set)
    is_dropped: bool = False
    """Its name is free; its bytes go with the last lease."""

    @property
    def slab_bytes(self) -> int:
        """What it takes in the arena."""
        return slab_bytes(self.ref.nbytes)


@dataclass(frozen=True, slots=True)
class Leased:
    """An entry and the lease that keeps it."""

    entry: Entry
    lease: int
