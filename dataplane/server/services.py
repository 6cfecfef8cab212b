"""The services of a node: the parts that its verbs use, such as the store, the datasets and the deriver.

The node makes these once, before its servers start. Every handler gets them as its first argument.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from dataplane.datasets.catalog import Catalog
from dataplane.datasets.parsing.pool import ParserPool
from dataplane.derive.decode_pool import DecodePool
from dataplane.derive.deriver import Deriver
from dataplane.server.call_limits import ByteBudget, CallLimits
from dataplane.server.meter import Meter
from dataplane.server.scope_owners import ScopeOwners
from dataplane.server.sessions import Sessions
from dataplane.storage.arena import Segment
from dataplane.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of one node. Each part is thread-safe."""

    node_id: str
    """The name of the node in refs."""
    host_id: str
    """The id of the machine. Readers map this node's memory only if their own host id is equal."""
    incarnation: str
    """A random name of this start of the node, so that clients notice a restart."""
    segment: Segment
    store: Store
    datasets: Catalog
    parsers: ParserPool
    pool: DecodePool
    deriver: Deriver
    scope_owners: ScopeOwners
    sessions: Sessions
    call_limits: CallLimits
    unannounced: ByteBudget
    """The budget for the bytes of puts whose size is not known yet."""
    meter: Meter
    numa: str = ""
    """The NUMA policy of the arena, as the owner of the node wrote it."""
    started: float = field(default_factory=time.monotonic)
    """The time of the start, in seconds of the monotonic clock."""

    @property
    def segments(self) -> list[dict[str, Any]]:
        """Path, size, device and inode of each segment, which readers need for mapping it."""
        return [self.segment.describe()]

    def hello(self) -> dict[str, Any]:
        """Return the first message of a stream: the node's id, its incarnation, and where its memory is."""
        return {
            "node": self.node_id,
            "incarnation": self.incarnation,
            "host": self.host_id,
            "segments": self.segments,
        }

    def stat(self) -> dict[str, Any]:
        """Return all counters of the node."""
        return {
            "node": self.node_id,
            "incarnation": self.incarnation,
            "host": self.host_id,
            "uptime_s": round(time.monotonic() - self.started, 3),
            "num_workers": self.pool.num_workers,
            "why_workers_unfiltered": self.pool.why_unfiltered,
            "segments": [{**segment, "numa": self.numa} for segment in self.segments],
            **self.parsers.stat(),
            **self.store.stat(),
            **self.sessions.stat(),
            **self.deriver.stat(),
            **self.meter.stat(),
            "datasets": self.datasets.stat(),
        }
