"""The Ray actor of the keeper. Importing this is cheap: the code that resolves refs loads in the actor's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from yatt_mm.protocol.kept import KeptGroup, Split

if TYPE_CHECKING:
    from yatt_mm.keeper.keeper import Keeper


class KeeperActor:
    """The body of the Ray actor; `yatt_mm.keeper.keeper` does the work."""

    def __init__(self, *, run_dir: Path, num_controllers: int, dataplane_uri: str, timeout_s: float) -> None:
        from yatt_mm.keeper.keeper import Keeper

        self._keeper: Keeper = Keeper(
            run_dir=run_dir, num_controllers=num_controllers, dataplane_uri=dataplane_uri, timeout_s=timeout_s
        )

    def keep(self, step: int, split: Split, groups: Sequence[KeptGroup], *, is_last: bool, restart_count: int) -> None:
        """Read some of a controller's kept groups, and write the file of the step with the last of them."""
        self._keeper.keep(step, split, groups, is_last=is_last, restart_count=restart_count)
