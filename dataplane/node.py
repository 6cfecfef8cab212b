"""A data-plane node: the segment, the store, the datasets, the pool and the Flight server, put together."""

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataplane.byte_port import BytePort
from dataplane.call_limits import CallLimits
from dataplane.config_checks import check_config
from dataplane.connect import Credentials
from dataplane.datasets import Datasets
from dataplane.derive import Deriver
from dataplane.disk import Disk
from dataplane.fetch import NUM_STREAMS
from dataplane.flight_server import FlightServer
from dataplane.hosts import default_host_id, new_node_id
from dataplane.limits import DEFAULT_LIMITS, MediaLimits
from dataplane.meter import Meter
from dataplane.metrics import Metrics
from dataplane.numa import NumaPolicy
from dataplane.offers import Offers
from dataplane.peer_fetcher import PeerFetcher
from dataplane.peers import Peers
from dataplane.pool import Pool
from dataplane.process import keep_freed_memory
from dataplane.scope_owners import GRACE_S, ScopeOwners
from dataplane.security import Security, host_in_uri, is_wildcard
from dataplane.segment import SHM_DIR, Segment, reap_dead_segments
from dataplane.store import Store
from dataplane.tokens import TokenFile
from dataplane.web import MetricsServer

REUSE_CONNECTION = "arrow-flight-reuse-connection://?"
"""Flight's own address for: where this answer came from."""
DEFAULT_SPILL_BYTES = 10 << 30

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What the owner of a node decides."""

    memory_bytes: int
    """The byte budget; taken from `/dev/shm` at once."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free port."""
    peer_port: int = 0
    """From which other nodes take bytes, unless this one speaks TLS; 0 takes any free port."""
    roots: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Dataset id to paths, globs or any fsspec URLs of tars, Parquet, JSON lines, or a Hugging Face folder."""
    media_roots: Sequence[Path] = ()
    """Folders, besides those of `roots`, into which paths in JSON lines and tables may lead."""
    num_workers: int = 1
    limits: MediaLimits = DEFAULT_LIMITS
    """What a medium may be before it is refused."""
    shm_dir: Path = SHM_DIR
    node_id: str = field(default_factory=new_node_id)
    """What refs name; a node that is started again with the same id is the same home."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Addresses of other nodes by id, from which objects are fetched."""
    directory: Path | None = None
    """A folder that only this user may write, in which nodes find each other."""
    advertise: str = ""
    """The address that others use; empty where they use the one that this node listens on."""
    peer_credentials: Credentials | None = None
    """What this node shows other nodes; None shows what its environment says."""
    num_streams: int = NUM_STREAMS
    """Connections over which a big object comes from another node."""
    host_id: str = field(default_factory=default_host_id)
    """Readers, writers and nodes share memory only where their host ids are equal."""
    security: Security = field(default_factory=Security)
    """Who may come in."""
    spill_dir: Path | None = None
    """Where objects go that have no room in memory, and durable ones; None keeps everything in memory."""
    spill_bytes: int = DEFAULT_SPILL_BYTES
    """What the files there may take."""
    numa: NumaPolicy | None = None
    """Where the arena's pages lie; None leaves it to the kernel."""
    scope_grace_s: float = GRACE_S
    """How long a client whose connection broke may take to come back before its scopes close."""
    call_limits: CallLimits = field(default_factory=CallLimits)
    """How much callers may ask for at once."""
    metrics_port: int | None = None
    """Of `/metrics` and the page for people; 0 takes any free port, None serves neither."""


class Node:
    """Runs in the process that makes it, until `stop`. One per process: it tunes the process's malloc."""

    def __init__(self, config: NodeConfig) -> None:
        check_config(config)
        tokens = TokenFile(config.security.token_file) if config.security.token_file else None
        self._config = config
        self._disk: Disk | None = None
        reap_dead_segments(config.shm_dir)
        keep_freed_memory()
        self.node_id = config.node_id
        self.host_id = config.host_id
        self.incarnation = secrets.token_hex(8)
        self.call_limits = config.call_limits
        self.meter = Meter()
        self._started = time.monotonic()
        self._segment = Segment(config.memory_bytes, self.node_id, config.shm_dir, config.numa)
        self._web: MetricsServer | None = None
        self.byte_port: BytePort | None = None
        """Where other nodes take bytes; None with TLS, since it is in the clear."""
        try:
            if config.spill_dir is not None:
                self._disk = Disk(config.spill_dir, config.spill_bytes, self.node_id)
            self._store = Store(self._segment, self._disk)
            self.offers = Offers(self._store)
            self.scope_owners = ScopeOwners(self._store, config.scope_grace_s)
            for owner in self._store.disk.recover():
                self.scope_owners.expect(owner)
            self._datasets = Datasets(config.roots, self.node_id, config.media_roots)
            self._pool = Pool(config.num_workers, self._segment.path, self._store.abort, config.limits)
            self._peers = Peers(self.node_id, config.peers, config.directory)
            self._fetcher = PeerFetcher(
                self._store, self._peers, credentials=config.peer_credentials, num_streams=config.num_streams
            )
            self._deriver = Deriver(self._store, self._datasets, self._pool, self.node_id, self._peers, self._fetcher)
            if config.security.tls_cert is None:
                self.byte_port = BytePort(config.host, config.peer_port, config.port, self)
            self._server = FlightServer(config.host, config.port, self, config.security, tokens)
            if config.metrics_port is not None:
                metrics = Metrics(self.node_id, self.stat, self.meter)
                self._web = MetricsServer(config.host, config.metrics_port, metrics, config.security, tokens)
            self.uri = f"{config.security.scheme}://{host_in_uri(config.host)}:{self._server.port}"
            self.public_uri = config.advertise or (REUSE_CONNECTION if is_wildcard(config.host) else self.uri)
            self._peers.announce(self.public_uri, self.host_id, self.incarnation)
        except BaseException:
            self._segment.unlink()
            if self.byte_port is not None:
                self.byte_port.close()
            if self._disk is not None:
                self._disk.close()
            raise

    @property
    def metrics_url(self) -> str | None:
        """Where `/metrics` and the page for people are."""
        return self._web.url if self._web else None

    @property
    def store(self) -> Store:
        """The node's objects."""
        return self._store

    @property
    def datasets(self) -> Datasets:
        """The node's datasets."""
        return self._datasets

    @property
    def deriver(self) -> Deriver:
        """What makes objects."""
        return self._deriver

    @property
    def pool(self) -> Pool:
        """What decodes media."""
        return self._pool

    @property
    def segments(self) -> list[dict[str, Any]]:
        """Path, size, device and inode of each segment, as readers need them."""
        return [self._segment.describe()]

    def hello(self) -> dict[str, Any]:
        """How a stream begins: who answers, since which start, on which machine, and where its memory lies."""
        return {
            "node": self.node_id,
            "incarnation": self.incarnation,
            "host": self.host_id,
            "segments": self.segments,
        }

    def stat(self) -> dict[str, Any]:
        """Everything the node counts."""
        return {
            "node": self.node_id,
            "incarnation": self.incarnation,
            "host": self.host_id,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "num_workers": self._pool.num_workers,
            "segments": [{**segment, "numa": str(self._config.numa or "")} for segment in self.segments],
            **self._store.stat(),
            **self._deriver.stat(),
            "num_timed_leases": len(self.offers),
            **self.meter.stat(),
            "datasets": self._datasets.stat(),
        }

    def stop(self, grace_s: float = 1.0) -> None:
        """Unlink the segment, end the workers, then stop serving; open streams are cut after `grace_s`.

        Views that readers hold stay valid: their memory lives until they drop it.
        """
        self._peers.withdraw()
        self._segment.unlink()
        self.scope_owners.close()
        self.offers.close()
        if self._web is not None:
            self._web.close()
        self._pool.close()
        self._fetcher.close()
        if self.byte_port is not None:
            self.byte_port.close()
        stopping = threading.Thread(target=self._server.shutdown, name="shutdown", daemon=True)
        stopping.start()
        stopping.join(grace_s)
        self._store.close()
        if self._disk is not None:
            self._disk.close()
