"""The store's record of an object: where its bytes are, and why it must stay."""

from dataclasses import dataclass, field

from dataplane.core.refs import Ref
from dataplane.storage.allocator import slab_bytes
from dataplane.storage.disk_files import DiskFile
from dataplane.storage.scopes import Scope


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """An allocated range of the arena. Its owner seals it or aborts it."""

    offset: int
    nbytes: int
    scope: Scope | None = None
    """The scope whose quota counts the bytes while they are written. A sealed object joins that scope."""


@dataclass(frozen=True, slots=True)
class Written:
    """A written slab, and the description of the object that it becomes when it is sealed."""

    slab: Slab
    ref: Ref
    digest: str = ""
    """The digest of the content, or an empty string if it is not known."""
    is_held: bool = False
    """True if a client stores the object itself. Outside of any scope it then stays until it is released."""
    file: DiskFile | None = None
    """The durable file that has this content already."""


@dataclass(slots=True, eq=False)
class Entry:
    """A sealed object."""

    ref: Ref
    slab: Slab | None
    """None if the bytes are on disk only."""
    is_held: bool
    """True if a client stored the object outside of any scope: it stays until it is released."""
    digest: str = ""
    """The digest of the content, or an empty string if it is not known."""
    scopes: set[Scope] = field(default_factory=set)
    file: DiskFile | None = None
    """The bytes on disk, spilled or durable. The bytes of a durable object may be in the arena as well."""
    is_dropped: bool = False
    """True if the object is released, so another object may take its name. Its bytes are freed with its last lease."""

    @property
    def may_be_lost(self) -> bool:
        """True if the node may drop the object: it can be made or fetched again, or clients released it."""
        return not self.is_held and not self.scopes

    @property
    def is_durable(self) -> bool:
        """True if the object has a file that survives the node."""
        return self.file is not None and self.file.is_durable

    @property
    def slab_bytes(self) -> int:
        """The bytes that the object takes in the arena while it is there."""
        return slab_bytes(self.ref.nbytes)


@dataclass(frozen=True, slots=True)
class Leased:
    """An entry and the lease that keeps it."""

    entry: Entry
    lease: int
