"""What a run has on the launcher's own host."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from yatt_mm.common.owned_dirs import owned_folder
from yatt_mm.config.run_config import Config
from yatt_mm.hosts.orders import NodeSettings
from yatt_mm.hosts.run_node import RunNode
from yatt_mm.hosts.scratch import Scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFolder:
    """A folder that all hosts of a run see at the same path, and only its user can enter."""

    nodes: Path
    """Where the nodes of the data plane find each other."""
    seen: Mapping[str, Path]
    """[key of the config] a file by which a host knows that it sees the folder of this key."""
    text: str
    """What each of these files holds."""

    @property
    def folders(self) -> list[Path]:
        """The folder, and those beside it in other parents."""
        return [file.parent for file in self.seen.values()]

    @property
    def root(self) -> Path:
        """The folder."""
        return self.nodes.parent


@contextmanager
def shared_folder(config: Config) -> Iterator[SharedFolder]:
    """Make the folder beside that of the run, and one in that of its checkpoints if it is another; remove them at the
    end of the block."""
    parents = {"run.dir": config.run_dir.absolute().parent}
    if config.checkpoint.dir is not None:
        parents["checkpoint.dir"] = Path(config.checkpoint.dir).absolute()
    with ExitStack() as stack:
        roots = {}
        for key, parent in parents.items():
            parent.mkdir(parents=True, exist_ok=True)
            roots[key] = stack.enter_context(owned_folder(parent, f".{config.run.name}.hosts-"))
        folder = SharedFolder(
            nodes=roots["run.dir"] / "nodes",
            seen={key: root / "seen" for key, root in roots.items()},
            text=secrets.token_hex(8),
        )
        folder.nodes.mkdir(mode=0o700)
        for seen in folder.seen.values():
            seen.write_text(folder.text)
        yield folder


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnHost:
    """What a run has on the launcher's own host."""

    scratch: Scratch
    node: RunNode
    settings: NodeSettings | None
    """Those of the node; None if the user started it."""
    shared: SharedFolder | None
    """What all hosts see; None in a run on one host."""
