"""The Ray actor of a reward worker. Importing this is cheap: the code that resolves refs loads in the actor's
process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yatt_mm.protocol.rewards import GroupRewards, RewardTask

if TYPE_CHECKING:
    from yatt_mm.rewards.worker import RewardWorker


class RewardActor:
    """The body of the Ray actor; `yatt_mm.rewards.worker` does the work."""

    def __init__(self, **settings: Any) -> None:
        """`settings`: those of a `RewardWorker`."""
        from yatt_mm.rewards.worker import RewardWorker

        self._worker: RewardWorker = RewardWorker(**settings)

    def ready(self) -> None:
        """Return as soon as the worker takes calls."""

    def score(self, tasks: list[RewardTask]) -> list[GroupRewards]:
        """Return the rewards of the groups, in order."""
        return self._worker.score(tasks)
