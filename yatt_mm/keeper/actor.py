"""The Ray actor of the keeper. Importing this is cheap: the code that resolves refs loads in the actor's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from yatt_mm.protocol.kept import KeptGroup, Split
from yatt_mm.protocol.saved_groups import SavedShare

if TYPE_CHECKING:
    from yatt_mm.keeper.group_files import GroupFiles
    from yatt_mm.keeper.keeper import Keeper


class KeeperActor:
    """The body of the Ray actor; `yatt_mm.keeper.keeper` and `yatt_mm.keeper.group_files` do the work."""

    def __init__(
        self,
        *,
        run_dir: Path,
        num_controllers: int,
        dataplane_uri: str,
        timeout_s: float,
        scope: str,
        durable: bool,
    ) -> None:
        """`scope`, `durable`: of the records of begun steps that are put back; see `Client.put`."""
        from dataplane.client.client import Client
        from dataplane.client.reader import Reader
        from yatt_mm.keeper.group_files import GroupFiles
        from yatt_mm.keeper.keeper import Keeper

        client, reader = Client(dataplane_uri, timeout_s=timeout_s), Reader(dataplane_uri, timeout_s=timeout_s)
        client.open_scope(scope)  # so that it is open again before this actor stores a record at a new node
        self._keeper: Keeper = Keeper(client, reader, run_dir=run_dir, num_controllers=num_controllers)
        self._files: GroupFiles = GroupFiles(client, reader, scope=scope, durable=durable)

    def keep(self, step: int, split: Split, groups: Sequence[KeptGroup], *, is_last: bool, restart_count: int) -> None:
        """Read some of a controller's kept groups, and write the file of the step with the last of them."""
        self._keeper.keep(step, split, groups, is_last=is_last, restart_count=restart_count)

    def save_groups(self, path: Path, share: SavedShare) -> None:
        """Write a controller's share of a begun step to a file."""
        self._files.write(path, share)

    def put_back(self, path: Path, name: str) -> SavedShare:
        """Store the records of such a file at the data plane, under names that begin with `name`."""
        return self._files.put_back(path, name)
