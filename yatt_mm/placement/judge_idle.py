"""How long a generation phase has nothing to judge: measured in one phase, expected of the next. Pure state.

A run's mover and the simulator's both keep it, for `Observation.genrm_lead_s`.
"""

from __future__ import annotations


class JudgeIdle:
    """Times are the caller's."""

    def __init__(self, *, decide_every_s: float) -> None:
        """`decide_every_s`: time between decisions inside a phase."""
        self._decide_every_s = decide_every_s
        self._began_s = 0.0
        self._lead_s: float | None = None
        """Of this phase, once there was something to judge."""
        self._last_lead_s = 0.0

    def begin(self, now_s: float) -> None:
        """A phase begins."""
        self._began_s = now_s
        self._last_lead_s, self._lead_s = self._lead_s or 0.0, None

    def left_s(self, num_present: int, now_s: float) -> float:
        """Seconds until the last decision before there will be something to judge; 0 when there was.

        num_present: requests that GenRM has now.
        """
        if self._lead_s is None and num_present:
            self._lead_s = now_s - self._began_s
        if self._lead_s is not None:
            return 0.0
        return self._began_s + self._last_lead_s - self._decide_every_s - now_s
