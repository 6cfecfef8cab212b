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
    GENRM = "genrm"
    TRAIN = "train"


class State(StrEnum):
    """How much of a device a role may hold."""

    ASLEEP = "asleep"
    WEIGHTS_ONLY = "weights_only"
    AWAKE = "awake"


class Phase(StrEnum):
    """A stretch of a step during which no role changes its state."""

    ROLLOUT = "rollout"
    JUDGE = "judge"
    """Only where there are generative reward models."""
    TRAIN = "train"
    PUBLISH = "publish"


FULL_COLOCATION: Mapping[Phase, Mapping[Role, State]] = {
    Phase.ROLLOUT: {Role.ROLLOUT: State.AWAKE, Role.GENRM: State.ASLEEP, Role.TRAIN: State.ASLEEP},
    Phase.JUDGE: {Role.ROLLOUT: State.ASLEEP, Role.GENRM: State.AWAKE, Role.TRAIN: State.ASLEEP},
    Phase.TRAIN: {Role.ROLLOUT: State.ASLEEP, Role.GENRM: State.ASLEEP, Role.TRAIN: State.AWAKE},
    Phase.PUBLISH: {Role.ROLLOUT: State.WEIGHTS_ONLY, Role.GENRM: State.ASLEEP, Role.TRAIN: State.WEIGHTS_ONLY},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices per worker of each role, and the state of each role in each phase."""

    rollout: tuple[tuple[int, ...], ...]
    """[engine] device numbers."""
    genrm: tuple[tuple[int, ...], ...] = ()
    """[engine of any judge] device numbers."""
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
        workers = {Role.ROLLOUT: self.rollout, Role.GENRM: self.genrm, Role.TRAIN: self.train}[role]
        return {device for devices in workers for device in devices}

    def transitions(self, before: Mapping[Role, State], phase: Phase) -> list[tuple[Role, State]]:
        """What must change to enter `phase`, in order: who gives memory up goes first."""
        rank = [State.ASLEEP, State.WEIGHTS_ONLY, State.AWAKE]
        wanted = self.states[phase]
        changes = [(role, wanted[role]) for role, state in before.items() if wanted[role] is not state]
        return sorted(changes, key=lambda change: rank.index(change[1]) - rank.index(before[change[0]]))


def full_colocation(*, num_devices: int, num_engines: int, num_judge_engines: int = 0) -> Placement:
    """One training rank on every device; engine e of either kind on device e modulo the devices."""
    return Placement(
        rollout=tuple((engine % num_devices,) for engine in range(num_engines)),
        genrm=tuple((engine % num_devices,) for engine in range(num_judge_engines)),
        train=tuple((rank,) for rank in range(num_devices)),
        states=FULL_COLOCATION,
    )
