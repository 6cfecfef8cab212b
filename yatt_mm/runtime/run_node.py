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
from dataplane.client.embedded import EmbeddedNode
from dataplane.core.errors import DataPlaneError
from yatt_mm.common.owned_dirs import owned_folder
from yatt_mm.common.tokens import write_token
from yatt_mm.config.run_config import Config
from yatt_mm.preflight.run_sets import held_out_root_of, held_out_sections, pattern_of, root_of

NODE_LOG = "node.log"
NODE_TOKEN = "node_token"
"""The name of the file with the token of a run's own node."""
TOKEN_FILE_VARIABLE = "DATAPLANE_TOKEN_FILE"
"""The variable of the environment that names the token file to every client."""
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


def start_node(stack: ExitStack, config: Config, run_id: str, *, scratch: Path, console: Console) -> RunNode:
    """Start a node that ends with `stack`, or use the one of `dataplane.uri`. Open the run's scope there."""
    node = _embedded(stack, config, run_id, scratch) if config.dataplane.uri is None else None
    uri = config.dataplane.uri if node is None else node.uri
    assert uri is not None
    if node is not None:
        memory = f"{config.dataplane.memory / 2**20:.0f} MiB"
        console.print(f"data plane at {uri}, {memory}", highlight=False, soft_wrap=True)
    scope = f"run-{run_id}"
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


def keep_log(scratch: Path, folder: Path) -> None:
    """Copy the log of the run's own node from its temporary files into a folder. An empty one is left out."""
    log = scratch / NODE_LOG
    if log.exists() and log.stat().st_size:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(log, folder)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment during a block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _embedded(stack: ExitStack, config: Config, run_id: str, scratch: Path) -> EmbeddedNode:
    roots = {root_of(one): [pattern_of(one)] for one in config.data.train}
    roots |= {held_out_root_of(name): [pattern_of(one)] for name, one in held_out_sections(config).items()}
    spill_in = Path(config.dataplane.spill_dir or scratch)
    spill_in.mkdir(parents=True, exist_ok=True)
    spill_dir = stack.enter_context(owned_folder(spill_in, "yatt-spill-"))
    token_file = write_token(scratch / NODE_TOKEN)
    stack.enter_context(_environment(TOKEN_FILE_VARIABLE, str(token_file)))
    return stack.enter_context(
        EmbeddedNode(
            log_file=scratch / NODE_LOG,
            memory_bytes=config.dataplane.memory,
            roots=roots,
            index_dir=Path(config.dataplane.index_dir) if config.dataplane.index_dir else None,
            media_roots=[Path(folder) for folder in config.data.media_roots],
            num_workers=config.dataplane.num_workers,
            tmp_dir=str(scratch),
            spill_dir=spill_dir,
            spill_bytes=config.dataplane.spill_size,
            token_file=token_file,
            node_id=run_id[-MAX_ID_CHARS:].lstrip("._-"),
        )
    )
