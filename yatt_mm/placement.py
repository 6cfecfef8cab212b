"""Which role may use which device, and in which state: full colocation, every role on every device, in turns.

Pure data; controllers carry the transitions out. Two awake roles never share a device; while weights are
published, and only then, training and rollout are both `weights_only`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """A part that needs devices."""

    ROLLOUT = "rollout"
    TRAIN = "train"


class State(StrEnum):
    """How much of a device a role may hold."""

    ASLEEP = "asleep"
    WEIGHTS_ONLY = "weights_only"
    AWAKE = "awake"


class Phase(StrEnum):
    """A stretch of a step during which no role changes its state."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    PUBLISH = "publish"


FULL_COLOCATION: Mapping[Phase, Mapping[Role, State]] = {
    Phase.ROLLOUT: {Role.ROLLOUT: State.AWAKE, Role.TRAIN: State.ASLEEP},
    Phase.TRAIN: {Role.ROLLOUT: State.ASLEEP, Role.TRAIN: State.AWAKE},
    Phase.PUBLISH: {Role.ROLLOUT: State.WEIGHTS_ONLY, Role.TRAIN: State.WEIGHTS_ONLY},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices per worker of each role, and the state of each role in each phase."""

    rollout: tuple[tuple[int, ...], ...]
    """[engine] device numbers."""
    train: tuple[tuple[int, ...], ...]
    """[rank] device numbers."""
    states: Mapping[Phase, Mapping[Role, State]]

    def __post_init__(self) -> None:
        for phase, states in self.states.items():
            awake = [role for role, state in states.items() if state is State.AWAKE]
            for i, role in enumerate(awake):
                for other in awake[i + 1 :]:
                    shared = self.devices(role) & self.devices(other)
                    if shared:
                        raise ValueError(
                            f"in phase {phase}, {role} and {other} are both awake on device(s) {sorted(shared)}"
                        )

    def devices(self, role: Role) -> set[int]:
        """Every device that a role may use."""
        workers = self.rollout if role is Role.ROLLOUT else self.train
        return {device for devices in workers for device in devices}

    def transitions(self, before: Mapping[Role, State], phase: Phase) -> list[tuple[Role, State]]:
        """What must change to enter `phase`, in order: who gives memory up goes first."""
        rank = [State.ASLEEP, State.WEIGHTS_ONLY, State.AWAKE]
        changes = [(role, state) for role, state in self.states[phase].items() if before[role] is not state]
        return sorted(changes, key=lambda change: rank.index(change[1]) - rank.index(before[change[0]]))


def full_colocation(*, num_devices: int, num_engines: int) -> Placement:
    """One training rank on every device; engine e on device e modulo the devices."""
    return Placement(
        rollout=tuple((engine % num_devices,) for engine in range(num_engines)),
        train=tuple((rank,) for rank in range(num_devices)),
        states=FULL_COLOCATION,
    )
