"""A controller's client of all data-plane nodes of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from dataplane.client.client import Client
from dataplane.core.errors import NodeUnavailableError
from dataplane.core.refs import Ref

MOST_AT_ONCE = 16
"""The most nodes that are asked at the same time."""


class RunClient(Client):
    """A client of the node on this controller's host that releases objects where they are, and adds up what all nodes
    count."""

    def __init__(self, uri: str, nodes: Mapping[str, str], *, timeout_s: float) -> None:
        """`nodes`: [node id] the addresses of the nodes of a run over several hosts."""
        super().__init__(uri, timeout_s=timeout_s)
        self._others = {node_id: Client(other, timeout_s=timeout_s) for node_id, other in nodes.items() if other != uri}

    def release(self, refs: Sequence[Ref]) -> int:
        """Drop plain objects on the nodes that hold them, and mark other objects there as the first to evict. Return
        how many there were. What a node held that is away has ended with it, or ends with the run's scope."""
        own = [ref for ref in refs if ref.node not in self._others]
        num_released = super().release(own) if own or not refs else 0
        for node_id, client in self._others.items():
            if there := [ref for ref in refs if ref.node == node_id]:
                with suppress(NodeUnavailableError):
                    num_released += client.release(there)
        return num_released

    def total(self, names: Sequence[str]) -> dict[str, Any]:
        """Return these counters of `stat`, added up over all nodes."""
        with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
            stats = [self.stat(), *pool.map(Client.stat, self._others.values())]
        return {name: sum(stat[name] for stat in stats) for name in names}

    def close(self) -> None:
        """Close the connections."""
        for client in self._others.values():
            client.close()
        super().close()
