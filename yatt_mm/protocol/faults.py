"""Why responses have no score: messages from reward workers and judges to controllers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

FUNCTION = "reward.function"
"""The source of the reward function's scores. Judges are called `reward.judges.NAME`."""
MAX_SHOWN = 200
"""The number of characters of a response, or of what a judge said, that messages show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a reward function or a judge gave a response no score."""

    what: str
    """The error with its type, or what else was wrong."""
    where: str
    """The place: a file and line, the name of a function, a server's address, or an engine."""
    response: str = ""
    """The beginning of the response."""
    trace: str = ""
    """The traceback inside the user's own code; empty if nothing of it raised."""

    @property
    def kind(self) -> tuple[str, str]:
        """The place and the type of the error. Faults of the same kind are told once."""
        return self.where, self.what.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """The responses of one group to which one source of scores gave none."""

    source: str
    num: int
    fault: Fault
    """Why the first of them has none."""
