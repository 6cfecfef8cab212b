"""What a role's engines did with their time, and how much work that was. Pure arithmetic.

A run's pools and the simulator's fleets keep the times, and both reckon the work for the placement policy from them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """Totals since some start, all in device-seconds or all in cell-seconds where nothing else is said."""

    any_s: float = 0.0
    """Seconds by the clock in which any engine had a request."""
    active_s: float = 0.0
    """Of engines with at least one request."""
    filled_s: float = 0.0
    """The same, an engine that is not full counted in proportion."""
    crowded_s: float = 0.0
    """Of all awake engines while there are more requests than fill them."""
    held_s: float = 0.0
    """Of engines that are awake."""

    def since(self, before: EngineTime) -> EngineTime:
        """The difference."""
        return EngineTime(
            any_s=self.any_s - before.any_s,
            active_s=self.active_s - before.active_s,
            filled_s=self.filled_s - before.filled_s,
            crowded_s=self.crowded_s - before.crowded_s,
            held_s=self.held_s - before.held_s,
        )


def work_s(times: EngineTime, *, is_rollout: bool, is_replacing: bool) -> float:
    """Work of a role. Of GenRM, which waits for responses, what its requests would have needed in full engines.

    Of rollout any time with a request, since responses take as long as they take. Not so with `is_replacing`, where
    groups without signal are replaced: rollout waits for verdicts there, and that few of its requests are left is
    GenRM's doing. More cells would have shortened only the time in which requests waited for room, fewer would have had
    to take over all that filled these; the mean of the two counts.
    """
    if not is_rollout:
        return times.filled_s
    return (times.filled_s + times.crowded_s) / 2 if is_replacing else times.active_s
