"""One meeting of all controllers: its name, what they bring, and what they get."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingKey:
    """The name of one meeting."""

    step: int
    phase: str
    restart_count: int
    """The number of restarts of the controllers. A call from an earlier start is refused."""
    sequence: int
    """The number of the controller's meetings before this one."""
    may_stop: bool = False
    """True at meetings at which a run that was told to stop gives the step up."""

    def __str__(self) -> str:
        return f"step {self.step}, phase {self.phase} (restart {self.restart_count}, meeting {self.sequence})"


@dataclass(slots=True)
class Meeting:
    """What controllers have brought to a meeting, and what they get there."""

    key: MeetingKey
    values: dict[int, Any] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Any = None
    num_left: int = 0


class StepGivenUp:
    """What a meeting gives to every controller, instead of its result, after the run was told to stop."""
