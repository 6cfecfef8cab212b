"""The data plane of a run: its own node (`dataplane.client.embedded` starts it again when it dies), or a node that the
user started."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode, absolute_pattern
from dataplane.core.errors import DataPlaneError
from yatt_mm.common.owned_dirs import owned_folder
from yatt_mm.common.tokens import write_token
from yatt_mm.config.run_config import Config
from yatt_mm.hosts.orders import NodeSettings
from yatt_mm.preflight.run_sets import held_out_root_of, held_out_sections, pattern_of, root_of

NODE_LOG = "node.log"
NODE_TOKEN = "node_token"
"""The name of the file with the token of a run's own node."""
INSECURE_VARIABLE = "DATAPLANE_INSECURE"
"""The variable of the environment with which clients say nothing of tokens that cross the network unencrypted."""
TOKEN_FILE_VARIABLE = "DATAPLANE_TOKEN_FILE"
"""The variable of the environment that names the token file to every client."""
LOOPBACK = "127.0.0.1"
SPILL_PREFIX = "yatt-spill-"
"""How the names of folders begin in which a run's own nodes keep what has no room in memory."""
SCOPE_TIMEOUT_S = 10.0
JOURNAL_FRAC = 0.125
"""The share of a node's disk that the records of the steps since the last checkpoint may take."""
MAX_ID_CHARS = 60
"""The length limit for the run's part of a node id, which may have 64 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNode:
    """The data-plane node that a run uses: its own, or one that the config names."""

    uri: str
    scope: str
    """The run's rollouts are in this scope, so they end with the run, however it ends."""
    durable: bool
    """True if the node has a disk: rollouts are written there before they count, and survive the death of the node."""
    journal_bytes: int
    """The most bytes of records that stay there for repairs."""
    node: EmbeddedNode | None
    """The run's own node; None if the user started the node."""

    @property
    def num_restarts(self) -> int:
        """How many times the run's own node was started again."""
        return self.node.num_restarts if self.node else 0

    @property
    def last_restart_s(self) -> float:
        """The seconds from the last death of the run's own node until it was back."""
        return self.node.last_restart_s if self.node else 0.0

    def check(self) -> None:
        """Raise NodeUnavailableError when the run's own node died too often to be started again."""
        if self.node is not None and self.node.failure is not None:
            raise self.node.failure


def node_settings(
    config: Config,
    run_id: str,
    *,
    scratch: Path,
    token_file: Path,
    address: str = LOOPBACK,
    directory: Path | None = None,
) -> NodeSettings:
    """Return how the launcher's host starts its node. `address`: where it listens."""
    roots = {root_of(one): [pattern_of(one)] for one in config.data.train}
    roots |= {held_out_root_of(name): [pattern_of(one)] for name, one in held_out_sections(config).items()}
    section = config.dataplane
    return NodeSettings(
        node_id=run_id[-MAX_ID_CHARS:].lstrip("._-"),
        host=address,
        directory=None if directory is None else str(directory),
        token_file=str(token_file),
        scratch=str(scratch),
        memory_bytes=section.memory,
        num_workers=section.num_workers,
        roots={name: [absolute_pattern(pattern) for pattern in patterns] for name, patterns in roots.items()},
        media_roots=[str(Path(folder).absolute()) for folder in config.data.media_roots],
        index_dir=str(Path(section.index_dir).absolute()) if section.index_dir else None,
        spill_in=str(Path(section.spill_dir or scratch).absolute()),
        spill_bytes=section.spill_size,
    )


def start_own_node(stack: ExitStack, settings: NodeSettings) -> EmbeddedNode:
    """Start a node that ends with `stack`."""
    spill_in = Path(settings.spill_in)
    spill_in.mkdir(parents=True, exist_ok=True)
    spill_dir = stack.enter_context(owned_folder(spill_in, SPILL_PREFIX))
    return stack.enter_context(
        EmbeddedNode(
            host=settings.host,
            log_file=Path(settings.scratch) / NODE_LOG,
            memory_bytes=settings.memory_bytes,
            roots=settings.roots,
            index_dir=Path(settings.index_dir) if settings.index_dir else None,
            media_roots=[Path(folder) for folder in settings.media_roots],
            num_workers=settings.num_workers,
            tmp_dir=settings.scratch,
            spill_dir=spill_dir,
            spill_bytes=settings.spill_bytes,
            token_file=Path(settings.token_file),
            directory=None if settings.directory is None else Path(settings.directory),
            node_id=settings.node_id,
        )
    )


@contextmanager
def node_token(folder: Path, *, has_hosts: bool = False) -> Iterator[Path]:
    """Write a token for a run's own nodes into a folder that only this user can enter, and let every client of this
    process show it during the block; yield its file. `has_hosts`: True if it crosses the network between hosts."""
    file = write_token(folder / NODE_TOKEN)
    before = dict(os.environ)
    os.environ |= {TOKEN_FILE_VARIABLE: str(file)} | ({INSECURE_VARIABLE: "1"} if has_hosts else {})
    try:
        yield file
    finally:
        for name in (TOKEN_FILE_VARIABLE, INSECURE_VARIABLE):
            os.environ.pop(name, None)
            os.environ |= {name: before[name]} if name in before else {}


def start_node(
    stack: ExitStack, config: Config, settings: NodeSettings | None, run_id: str, console: Console
) -> RunNode:
    """Start a node that ends with `stack`, or without settings use the one of `dataplane.uri`. Open the run's scope
    there."""
    node = None if settings is None else start_own_node(stack, settings)
    uri = config.dataplane.uri if node is None else node.uri
    assert uri is not None
    if node is not None:
        memory = f"{config.dataplane.memory / 2**20:.0f} MiB"
        console.print(f"data plane at {uri}, {memory}", highlight=False, soft_wrap=True)
    return open_run_scope(stack, uri, f"run-{run_id}", node)


def open_run_scope(stack: ExitStack, uri: str, scope: str, node: EmbeddedNode | None) -> RunNode:
    """Open the run's scope at a node until `stack` ends, and return the node as the run uses it."""
    client = stack.enter_context(Client(uri, timeout_s=SCOPE_TIMEOUT_S))
    client.open_scope(scope)
    stack.callback(_close_scope, client, scope)
    on_disk = client.stat()["spill_budget_bytes"]
    journal_bytes = int(JOURNAL_FRAC * on_disk)  # what is in memory alone ends with the node
    return RunNode(uri=uri, scope=scope, durable=on_disk > 0, journal_bytes=journal_bytes, node=node)


def _close_scope(client: Client, scope: str) -> None:
    """Drop the run's objects now. A node that is gone has dropped them already."""
    with contextlib.suppress(DataPlaneError):
        client.close_scope(scope)


def keep_log(scratch: Path, folder: Path, name: str = NODE_LOG) -> None:
    """Copy the log of a run's own node from its temporary files into a folder, under this name. An empty one is left
    out."""
    log = scratch / NODE_LOG
    if log.exists() and log.stat().st_size:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(log, folder / name)
