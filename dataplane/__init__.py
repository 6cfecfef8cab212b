"""The data plane: an Arrow Flight service that holds media, so that only processes that compute with pixels see them.

The public names are `Client` (talks to a node), `Reader` and `Writer` (map a node's shared memory), `EmbeddedNode`
(starts a node as a child process) and `Ref` (names an object). Each name loads its module at first use, so a process
that uses only `Client` maps no shared memory. `python -m dataplane serve` runs a node from a terminal.

The packages: `core` (records, errors and formats that all parts share), `client`, `cli` (the command line), `server`
(a node's Flight service), `storage` (its memory and disk), `derive` (making derived objects), `media` (decoding images
and videos), `datasets` (reading shards) and `cluster` (fetching objects from other nodes).

If a node dies, `client/embedded.py` starts it again and `client/retry.py` lets calls wait. `derive/deriver.py` makes
lost objects again when they are requested, and `storage/disk_tier.py` brings back those on disk. If another node of the
cluster dies, `cluster/fetcher.py` notices, and `derive/fetch_or_make.py` makes its objects here.

May import: cli, client, core.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane.client.client import Client
    from dataplane.client.embedded import EmbeddedNode
    from dataplane.client.reader import Reader
    from dataplane.client.writer import Writer
    from dataplane.core.refs import Ref

__all__ = ["Client", "EmbeddedNode", "Reader", "Ref", "Writer"]

_MODULES = {
    "Client": "dataplane.client.client",
    "EmbeddedNode": "dataplane.client.embedded",
    "Reader": "dataplane.client.reader",
    "Ref": "dataplane.core.refs",
    "Writer": "dataplane.client.writer",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dataplane' has no public name {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
