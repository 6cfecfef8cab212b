"""How much the parts of a run have done, on whichever of its hosts they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt_mm.common.progress import Done, progress_of

REPLY_S = 5.0
"""The seconds in which a host must reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProgress:
    """Reads the progress of parts of a run from the files of this host, and asks other hosts for theirs."""

    agents: tuple[Any, ...] = ()
    """The agents of all hosts; none in a run on one host."""
    folder: Path | None = None
    """See `progress_path`."""

    def of(self, names: Sequence[str]) -> list[Done | None]:
        """Return what these parts have done; None for those that have not begun, and for those of a host that does not
        reply. `names`: those that errors use."""
        found = [progress_of(name, self.folder) for name in names]
        if not self.agents or None not in found:
            return found
        import ray  # a run on one host needs it nowhere here, nor do the tests of what hands this on

        calls = [agent.done.remote(list(names)) for agent in self.agents]
        replied, _ = ray.wait(calls, num_returns=len(calls), timeout=REPLY_S)
        for call in replied:
            with suppress(ray.exceptions.RayError):  # a host is gone: who waits for it notices
                found = [own or other for own, other in zip(found, ray.get(call), strict=True)]
        return found
