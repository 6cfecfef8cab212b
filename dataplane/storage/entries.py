"""What the store keeps of an object: where it lies, and why it may not go."""

from dataclasses import dataclass, field

from dataplane.core.refs import Ref
from dataplane.storage.allocator import slab_bytes
from dataplane.storage.disk_files import DiskFile
from dataplane.storage.scopes import Scope


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
    slab: Slab | None
    """None where it lies on disk only."""
    is_held: bool
    """Somebody put it by hand, outside of any scope: it stays until it is released."""
    digest: str = ""
    """Of its content, where it is known; else empty."""
    scopes: set[Scope] = field(default_factory=set)
    file: DiskFile | None = None
    """Its bytes on disk: spilled, or durable; those of a durable object may lie in the arena as well."""
    is_dropped: bool = False
    """Its name is free; its bytes go with the last lease."""

    @property
    def may_be_lost(self) -> bool:
        """Nobody asked for it to stay: it can be made again, or fetched again, or is wanted no more."""
        return not self.is_held and not self.scopes

    @property
    def is_durable(self) -> bool:
        """It has a file that survives the node."""
        return self.file is not None and self.file.is_durable

    @property
    def slab_bytes(self) -> int:
        """What it takes in the arena, while it lies there."""
        return slab_bytes(self.ref.nbytes)


@dataclass(frozen=True, slots=True)
class Leased:
    """An entry and the lease that keeps it."""

    entry: Entry
    lease: int
