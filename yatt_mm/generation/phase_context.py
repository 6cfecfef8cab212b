"""What all stages of one generation phase of one controller share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dataplane.client.client import Client
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.config.run_config import Config
from yatt_mm.generation.engine_requests import Engines, FixedEngines, QueuedEngines
from yatt_mm.generation.phase_calls import PhaseCalls
from yatt_mm.placement.coordinator_client import CoordinatorClient
from yatt_mm.protocol.control import Team

CHUNK_SIZE = 8
"""The number of groups per call where no caller waits for single groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseContext:
    """One generation phase of one controller."""

    controller: int
    config: Config
    team: Team
    client: Client
    rendezvous: RendezvousClient
    coordinator: CoordinatorClient
    calls: PhaseCalls
    name: str
    """The name of the phase, in errors and in the names of objects; unique in a run."""
    number: int
    """The coordinator's number of the phase."""
    awake: Mapping[str, tuple[int, ...]]
    """[pool] the numbers of the engines that were awake when the phase began."""

    @property
    def is_deterministic(self) -> bool:
        """True if every engine gets all controllers' requests of a phase as one batch."""
        return self.config.rollout.deterministic

    def engines(self, pool: str) -> Engines:
        """Return the `Engines` through which this controller's groups get an engine of the pool."""
        if self.is_deterministic:
            return FixedEngines(self.awake[pool])
        return QueuedEngines(self.calls, self.coordinator, pool, phase=self.number)
