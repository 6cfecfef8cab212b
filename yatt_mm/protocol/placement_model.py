"""The placement: which role may use which device, and in which state. Pure data and rules; the coordinator carries them
out.

Full colocation: every role uses every device, in turns. Partial colocation: in the generation phase the devices are
divided between rollout and GenRM, and afterwards training has all of them. A *cell* moves between the two as one unit:
the devices of the largest engine, which hold whole engines of the policy and of every judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain


class Role(StrEnum):
    """A part of the run that needs devices."""

    ROLLOUT = "rollout"
    GENRM = "genrm"
    TRAIN = "train"


class State(StrEnum):
    """How much of its devices' memory a unit holds."""

    ASLEEP = "asleep"
    WEIGHTS_ONLY = "weights_only"
    AWAKE = "awake"


MEMORY = (State.ASLEEP, State.WEIGHTS_ONLY, State.AWAKE)
"""The states in the order of the memory that they hold."""


class Phase(StrEnum):
    """A part of a training step, in which each role has one state on its devices."""

    ROLLOUT = "rollout"
    """All devices sample responses."""
    JUDGE = "judge"
    """All devices judge responses. Only with generative reward models, in full colocation."""
    GENERATION = "generation"
    """Some devices sample responses, the others judge. Partial colocation only."""
    TRAIN = "train"
    PUBLISH = "publish"


STATES: Mapping[Phase, Mapping[Role, State]] = {
    Phase.ROLLOUT: {Role.ROLLOUT: State.AWAKE, Role.GENRM: State.ASLEEP, Role.TRAIN: State.ASLEEP},
    Phase.JUDGE: {Role.ROLLOUT: State.ASLEEP, Role.GENRM: State.AWAKE, Role.TRAIN: State.ASLEEP},
    Phase.GENERATION: {Role.ROLLOUT: State.AWAKE, Role.GENRM: State.AWAKE, Role.TRAIN: State.ASLEEP},
    Phase.TRAIN: {Role.ROLLOUT: State.ASLEEP, Role.GENRM: State.ASLEEP, Role.TRAIN: State.AWAKE},
    Phase.PUBLISH: {Role.ROLLOUT: State.WEIGHTS_ONLY, Role.GENRM: State.ASLEEP, Role.TRAIN: State.WEIGHTS_ONLY},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An engine or a training rank: the smallest part of a run that is put to sleep and woken up."""

    role: Role
    pool: str
    """`rollout`, `train`, or the judge's name: the engines that do the same work."""
    index: int
    """The number of the engine in its pool, or the rank."""
    devices: tuple[int, ...]
    """The devices; none for a judge that is a remote server."""

    def __str__(self) -> str:
        """Return the name that errors use."""
        if self.role is Role.TRAIN:
            return f"training rank {self.index}"
        return f"engine {self.index}" + (f" of judge {self.pool}" if self.role is Role.GENRM else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The units of a run and the devices that each of them uses."""

    units: tuple[Unit, ...]
    cells: tuple[tuple[int, ...], ...] = ()
    """[cell] the devices that go to rollout or to GenRM together; empty in full colocation."""
    devices_per_host: int | None = None
    """None if all devices are on one host. Devices are numbered host by host."""

    @property
    def is_partial(self) -> bool:
        """True when rollout and GenRM work at the same time."""
        return bool(self.cells)

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return 1 + max(self.host_of(unit) for unit in self.units)

    def host_of(self, unit: Unit) -> int:
        """Return the number of the host of a unit; 0 for a judge that is a remote server."""
        return unit.devices[0] // self.devices_per_host if self.devices_per_host and unit.devices else 0

    def host_of_number(self, number: int) -> int:
        """Return the number of the host of the controller or the reward worker with this number: they are divided over
        the hosts."""
        return number % self.num_hosts

    def without(self, role: Role) -> Placement:
        """Return the placement without the units of a role."""
        return replace(self, units=tuple(unit for unit in self.units if unit.role is not role))

    def of_role(self, role: Role) -> tuple[Unit, ...]:
        """Return the units of a role."""
        return tuple(unit for unit in self.units if unit.role is role)

    def pools(self) -> dict[str, tuple[Unit, ...]]:
        """Return the units of each pool, by the pool's name."""
        names = dict.fromkeys(unit.pool for unit in self.units)
        return {name: tuple(unit for unit in self.units if unit.pool == name) for name in names}

    def devices(self, role: Role) -> tuple[tuple[int, ...], ...]:
        """Return the device numbers of each unit of the role."""
        return tuple(unit.devices for unit in self.of_role(role))

    def in_cell(self, cell: int, role: Role) -> tuple[Unit, ...]:
        """Return the role's units on the devices of a cell."""
        return tuple(unit for unit in self.of_role(role) if unit.devices and set(unit.devices) <= set(self.cells[cell]))

    def wanted(self, phase: Phase, rollout_cells: Iterable[int] = ()) -> dict[Unit, State]:
        """Return the state of each unit in a phase. In `GENERATION` the cells in `rollout_cells` sample, all others
        judge."""
        states = {unit: STATES[phase][unit.role] for unit in self.units}
        if phase is Phase.GENERATION:
            answering = {device for cell in rollout_cells for device in self.cells[cell]}
            for unit in self.units:
                if unit.role is Role.TRAIN or not unit.devices:
                    continue
                if (unit.role is Role.ROLLOUT) != (unit.devices[0] in answering):
                    states[unit] = State.ASLEEP
        return states


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of a pool."""

    num: int
    tp: int = 1
    """The devices of each engine; 0 for remote servers."""

    @property
    def num_devices(self) -> int:
        """The number of devices of all engines together."""
        return self.num * self.tp


def full_colocation(*, num_devices: int, rollout: Engines, judges: Mapping[str, Engines]) -> Placement:
    """Return the placement with one training rank on every device; the policy's engines are placed from the first
    device on, and so are all judges' engines, one after another."""
    first, units_of_judges = 0, []
    for name, engines in judges.items():
        units_of_judges.append(_units(Role.GENRM, name, engines, first=first))
        first += engines.num_devices
    return Placement(
        units=(
            *_units(Role.ROLLOUT, "rollout", rollout),
            *chain.from_iterable(units_of_judges),
            *_units(Role.TRAIN, "train", Engines(num=num_devices)),
        )
    )


def partial_colocation(*, num_devices: int, rollout: Engines, judges: Mapping[str, Engines]) -> Placement:
    """Return the placement in which every device has a training rank, a place in an engine of the policy, and one in an
    engine of each judge.

    Judges that are remote servers use no device and are not part of the placement.
    """
    size = cell_size(rollout, judges.values())
    return Placement(
        units=(
            *_units(Role.ROLLOUT, "rollout", rollout),
            *chain.from_iterable(_units(Role.GENRM, name, engines) for name, engines in judges.items()),
            *_units(Role.TRAIN, "train", Engines(num=num_devices)),
        ),
        cells=tuple(tuple(range(first, first + size)) for first in range(0, num_devices, size)),
    )


def cell_size(rollout: Engines, judges: Iterable[Engines]) -> int:
    """Return the devices of a cell: those of the largest engine."""
    return max(engines.tp for engines in (rollout, *judges))


def _units(role: Role, pool: str, engines: Engines, *, first: int = 0) -> list[Unit]:
    """Return the units of a pool, one after another, from device `first` on."""
    return [
        Unit(role=role, pool=pool, index=index, devices=tuple(range(begin, begin + engines.tp)))
        for index, begin in enumerate(first + index * engines.tp for index in range(engines.num))
    ]
