"""How much the parts of a run have done, on whichever of its hosts they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yatt_mm.common.progress import Done, progress_of

REPLY_S = 5.0
"""The seconds in which a host must reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProgress:
    """Reads the progress of parts of a run from the files of this host, and asks other hosts for theirs."""

    agents: tuple[Any, ...] = ()
    """The agents of all hosts, the launcher's first; none in a run on one host."""
    hosts: Mapping[str, int] = field(default_factory=dict)
    """[name of a part] the index of its host's agent. A part without one is on the launcher's host."""
    folder: Path | None = None
    """See `progress_path`."""

    def of(self, names: Sequence[str]) -> list[Done | None]:
        """Return what these parts have done; None for those that have not begun, and for those of a host that does not
        reply. `names`: those that errors use."""
        found = [progress_of(name, self.folder) for name in names]
        asked: dict[int, list[int]] = {}
        if self.agents:
            for at, (name, done) in enumerate(zip(names, found)):
                if done is None:
                    asked.setdefault(self.hosts.get(name, 0), []).append(at)
        if not asked:
            return found
        import ray  # a run on one host needs it nowhere here, nor do the tests of what hands this on

        calls = {self.agents[host].done.remote([names[i] for i in at]): at for host, at in asked.items()}
        replied, _ = ray.wait(list(calls), num_returns=len(calls), timeout=REPLY_S)
        for call in replied:
            with suppress(ray.exceptions.RayError):  # a host is gone: who waits for it notices
                for i, done in zip(calls[call], ray.get(call), strict=True):
                    found[i] = done
        return found
