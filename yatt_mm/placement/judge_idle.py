"""The time at the start of a generation phase in which GenRM has nothing to judge. Pure state.

It is measured in one phase and expected again in the next. The run's `Rebalancer` and the simulator both use it to
fill `Observation.genrm_lead_s` for the placement policy.
"""

from __future__ import annotations


class JudgeIdle:
    """Measures how long GenRM waits for the first responses of a phase. The caller gives the times."""

    def __init__(self, *, decide_every_s: float) -> None:
        """`decide_every_s`: seconds between decisions inside a phase."""
        self._decide_every_s = decide_every_s
        self._began_s = 0.0
        self._lead_s: float | None = None
        """The seconds until GenRM had its first request in this phase; None while it has had none."""
        self._last_lead_s = 0.0

    def begin(self, now_s: float) -> None:
        """Start a new phase at `now_s` (the caller's clock). The wait of GenRM in the last phase is the expected wait
        in this one."""
        self._began_s = now_s
        self._last_lead_s, self._lead_s = self._lead_s or 0.0, None

    def left_s(self, num_present: int, now_s: float) -> float:
        """Return the expected seconds until the placement policy's last decision before GenRM's first request; may be
        negative.

        0 if GenRM has had a request in this phase. `num_present`: requests that GenRM has now.
        """
        if self._lead_s is None and num_present:
            self._lead_s = now_s - self._began_s
        if self._lead_s is not None:
            return 0.0
        return self._began_s + self._last_lead_s - self._decide_every_s - now_s
