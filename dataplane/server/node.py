"""The class `Node`: it makes the services from a configuration, starts the servers over them, and stops both."""

import logging
import secrets
import threading
from typing import TYPE_CHECKING, Any

from dataplane.cluster.fetcher import PeerFetcher
from dataplane.cluster.peer_directory import PeerDirectory
from dataplane.core.process import keep_freed_memory
from dataplane.core.token_file import TokenFile
from dataplane.datasets.catalog import Catalog
from dataplane.datasets.parsing.pool import ParserPool
from dataplane.derive.decode_pool import DecodePool
from dataplane.derive.deriver import Deriver
from dataplane.server.call_limits import ByteBudget
from dataplane.server.config import NodeConfig, check_config
from dataplane.server.flight_server import FlightServer
from dataplane.server.meter import Meter
from dataplane.server.scope_owners import ScopeOwners
from dataplane.server.services import Services
from dataplane.server.sessions import Sessions
from dataplane.storage.arena import Segment, reap_dead_segments
from dataplane.storage.disk_files import DiskFiles
from dataplane.storage.store import Store

if TYPE_CHECKING:
    from dataplane.server.metrics_http import MetricsServer

log = logging.getLogger(__name__)


class Node:
    """A data-plane node in the present process, from construction until `stop`. One per process, because it tunes the
    process's malloc."""

    def __init__(self, config: NodeConfig) -> None:
        check_config(config)
        self.config = config
        tokens = TokenFile(config.security.token_file) if config.security.token_file else None
        reap_dead_segments(config.shm_dir)
        keep_freed_memory()
        segment = Segment(config.memory_bytes, config.node_id, config.shm_dir, config.numa)
        self._disk: DiskFiles | None = None
        self._web: MetricsServer | None = None
        try:
            if config.spill_dir is not None:
                self._disk = DiskFiles(config.spill_dir, config.spill_bytes, config.node_id)
            self.services = self._make_services(config, segment)
            self._start_servers(config, tokens)
        except BaseException:
            segment.unlink()
            if self._disk is not None:
                self._disk.close()
            raise

    @property
    def uri(self) -> str:
        """The address at which the node listens."""
        return self._server.uri

    @property
    def metrics_url(self) -> str | None:
        """The address of the metrics, without `/metrics`; None if the node serves none."""
        return self._web.url if self._web else None

    def stat(self) -> dict[str, Any]:
        """Return all counters of the node."""
        return self.services.stat()

    def stop(self, grace_s: float = 1.0) -> None:
        """Unlink the segment, end workers and parsers, and stop serving. Streams that are open after `grace_s` seconds
        are cancelled.

        Views of readers stay valid: their memory lives until the readers drop them.
        """
        self._peers.withdraw()
        self.services.sessions.close()
        self.services.segment.unlink()
        self.services.scope_owners.close()
        if self._web is not None:
            self._web.close()
        self.services.pool.close()
        self.services.parsers.close()
        self._fetcher.close()
        stopping = threading.Thread(target=self._server.shutdown, name="shutdown", daemon=True)
        stopping.start()
        stopping.join(grace_s)
        self.services.store.close()
        if self._disk is not None:
            self._disk.close()

    # -- private: construction --------------------------------------------------------------------------------------

    def _make_services(self, config: NodeConfig, segment: Segment) -> Services:
        """Return all parts that the servers need."""
        store = Store(segment, self._disk)
        scope_owners = ScopeOwners(store, config.scope_grace_s)
        for owner in store.disk.recover():
            scope_owners.expect(owner)
        parsers = ParserPool()
        datasets = Catalog(config.roots, config.node_id, config.media_roots, config.index_dir, parsers)
        pool = DecodePool(config.num_workers, store, config.limits)
        self._peers = PeerDirectory(config.node_id, config.peers, config.directory)
        self._fetcher = PeerFetcher(
            store, self._peers, credentials=config.peer_credentials, num_streams=config.num_streams
        )
        return Services(
            node_id=config.node_id,
            host_id=config.host_id,
            incarnation=secrets.token_hex(8),
            segment=segment,
            store=store,
            datasets=datasets,
            parsers=parsers,
            pool=pool,
            deriver=Deriver(store, datasets, pool, config.node_id, self._peers, self._fetcher),
            scope_owners=scope_owners,
            sessions=Sessions(store, segment),
            call_limits=config.call_limits,
            unannounced=ByteBudget(segment.capacity, 1),
            meter=Meter(),
            numa=str(config.numa or ""),
        )

    def _start_servers(self, config: NodeConfig, tokens: TokenFile | None) -> None:
        """Start the servers, and only then tell other nodes the address."""
        services = self.services
        self._server = FlightServer(config, services, tokens)
        if config.metrics_port is not None:
            from dataplane.server.metrics_http import MetricsServer  # a server for HTTP, which most nodes do not need
            from dataplane.server.prometheus import Metrics

            metrics = Metrics(services.node_id, services.stat, services.meter)
            self._web = MetricsServer(config.host, config.metrics_port, metrics.registry, config.security, tokens)
        self._peers.announce(self._server.public_uri, services.host_id, services.incarnation)
