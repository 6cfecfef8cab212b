"""The cells of a simulation: what each cell does at which time. Putting a second awake role on a cell is an error."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    """What a cell does: the work of a role, publishing, switching roles, or nothing."""

    ROLLOUT = "rollout"
    GENRM = "genrm"
    TRAIN = "train"
    PUBLISH = "publish"
    SWITCH = "switch"
    """One role goes to sleep and another role wakes up on the cell."""
    IDLE = "idle"


AWAKE = (Use.ROLLOUT, Use.GENRM, Use.TRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A period of time in which a cell does one kind of work."""

    cell: int
    use: Use
    start_s: float
    end_s: float


class Cells:
    """What every cell does now, with the history of each."""

    def __init__(self, num_cells: int) -> None:
        self.num = num_cells
        self.spans: list[Span] = []
        self._use = [Use.IDLE] * num_cells
        self._since_s = [0.0] * num_cells

    def put(self, cell: int, use: Use, now_s: float) -> None:
        """Let a cell do something else from now on. Between two awake roles there must be SWITCH or IDLE."""
        before = self._use[cell]
        assert before is not use, f"cell {cell} is already at {use}"
        assert not (before in AWAKE and use in AWAKE), f"{before} and {use} would both be awake on cell {cell}"
        if now_s > self._since_s[cell]:
            self.spans.append(Span(cell=cell, use=before, start_s=self._since_s[cell], end_s=now_s))
        self._use[cell], self._since_s[cell] = use, now_s

    def use_of(self, cell: int) -> Use:
        """Return what the cell does now."""
        return self._use[cell]

    def close(self, now_s: float) -> None:
        """Close the last span of every cell."""
        for cell in range(self.num):
            if self._use[cell] is not Use.IDLE:
                self.put(cell, Use.IDLE, now_s)
