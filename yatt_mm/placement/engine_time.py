"""Time in which a role's engines were awake and busy, and the work that this means. Pure arithmetic.

The pools of a run and the fleets of the simulator both measure these times. Both compute the work for the placement
policy from them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """Times of a role's engines, summed since some start.

    All but `any_active_s` have the same unit: device-seconds or cell-seconds.
    """

    any_active_s: float = 0.0
    """The seconds of wall time in which at least one engine had a request."""
    active_s: float = 0.0
    """The time of engines that had at least one request."""
    filled_s: float = 0.0
    """The time of engines weighted by how full they were: an engine with half of its requests counts half."""
    crowded_s: float = 0.0
    """The time of all awake engines while requests waited for room."""
    held_s: float = 0.0
    """The time of engines that were awake."""

    def since(self, before: EngineTime) -> EngineTime:
        """Return the times that were added since `before`."""
        return EngineTime(
            any_active_s=self.any_active_s - before.any_active_s,
            active_s=self.active_s - before.active_s,
            filled_s=self.filled_s - before.filled_s,
            crowded_s=self.crowded_s - before.crowded_s,
            held_s=self.held_s - before.held_s,
        )


def work_s(times: EngineTime, *, is_rollout: bool, is_replacing: bool) -> float:
    """Return the work of a role, in the unit of `times`.

    GenRM waits for responses, so its work is the time that its requests would have needed in full engines. The work of
    rollout is all time with a request, because the length of a response does not depend on how full an engine is.

    `is_replacing` means that groups without signal are replaced. Rollout then waits for verdicts, so its engines can be
    half empty only because GenRM is slow. More cells would have shortened only the time in which requests waited for
    room. With fewer cells, the remaining engines would have had to take all requests of the removed ones. The result is
    the mean of these two estimates.
    """
    if not is_rollout:
        return times.filled_s
    return (times.filled_s + times.crowded_s) / 2 if is_replacing else times.active_s
