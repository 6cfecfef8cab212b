"""What the launcher orders from another host of a run, and what that replies. Only the standard library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from yatt_mm.hosts.scratch import Scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How a host starts its node of a run. All paths are absolute, as text, so that other hosts can read them too."""

    node_id: str
    host: str
    """The address at which it listens."""
    directory: str | None
    """The folder in which the nodes of a run over several hosts find each other."""
    token_file: str
    scratch: str
    memory_bytes: int
    num_workers: int
    roots: Mapping[str, Sequence[str]]
    """[name] the patterns of a data set's files."""
    media_roots: Sequence[str]
    index_dir: str | None
    spill_in: str
    """The node makes its folder for files inside this one."""
    spill_bytes: int

    def on(self, number: int, address: str) -> NodeSettings:
        """Return those of another host of the run."""
        return replace(self, node_id=f"{self.node_id}-{number}", host=address)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """What a run wants on one of its other hosts."""

    number: int
    """The number of the host in the run."""
    scratch: Scratch
    """The folders of the first host; those of this one get the same paths."""
    node: NodeSettings
    scope: str
    log_dir: Path

    def text(self) -> str:
        """Return the line that `host_process` reads."""
        return json.dumps(
            {
                "number": self.number,
                "files": str(self.scratch.files),
                "weights": str(self.scratch.weights),
                "node": asdict(self.node),
                "scope": self.scope,
                "log_dir": str(self.log_dir),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReady:
    """What a host has for the run."""

    uri: str
    """The address of its node."""
    interface: str
    """The name of the network device with the host's address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNews:
    """What has happened to a host's node."""

    num_restarts: int = 0
    last_restart_s: float = 0.0
    failure: str = ""
    """Why it is not started again; empty as long as it is."""
