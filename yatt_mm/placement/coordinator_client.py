"""The coordinator as a controller sees it: one typed method for each of its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from yatt_mm.common.ray_calls import ask_actor
from yatt_mm.placement.coordinator import Coordinator, PhaseEntry
from yatt_mm.placement.engine_pool import Ended
from yatt_mm.placement.usage_report import UsageReport
from yatt_mm.protocol.placement_model import Phase


class CoordinatorClient:
    """Calls the coordinator for one controller, always with a deadline. `Coordinator` says what each call does."""

    def __init__(self, actor: Any, *, controller: int, deadline_s: float) -> None:
        """`actor`: the handle of the Ray actor."""
        self._actor = actor
        self._controller = controller
        self._deadline_s = deadline_s

    def enter(
        self, phase: Phase, *, step: int, is_measured: bool, requests_per_engine: Mapping[str, int] | None
    ) -> PhaseEntry:
        """Bring every unit into its state for `phase`. Raises WorkerError if that failed or took too long."""
        return self._ask(Coordinator.enter, phase, step, is_measured, requests_per_engine)

    def acquire(self, number: int, pool: str, count: int, ended: Sequence[Ended]) -> Awaitable[list[int]]:
        """Wait for engines for this controller's `count` requests of phase `number`."""
        return self._actor.acquire.remote(number, pool, self._controller, count, list(ended))

    def want(self, number: int, pool: str, count: int, ended: Sequence[Ended]) -> None:
        """Say how many requests wait, and which engines gave requests back. Does not wait."""
        self._actor.want.remote(number, pool, self._controller, count, list(ended))

    def lose(self, number: int, pool: str, engine: int) -> Awaitable[bool]:
        """Let no request go to an engine any more; the result is False if no other one of the pool is awake."""
        return self._actor.lose.remote(number, pool, engine)

    def take_report(self) -> UsageReport:
        """Return what happened on the devices since the last call."""
        return self._ask(Coordinator.take_report)

    def _ask(self, method: Any, *arguments: Any) -> Any:
        return ask_actor("the coordinator", self._actor, method, *arguments, deadline_s=self._deadline_s)
