"""Which role may use which device, and in which state. Pure data and its rules; the coordinator carries it out.

Full colocation: every role on every device, in turns. Partial colocation: while prompts are answered and judged, the
devices are divided into those of rollout and those of GenRM; training has all of them afterwards. What passes from one
to the other is a *cell*: the devices of the largest engine, which hold whole engines of the policy and of every judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain


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


MEMORY = (State.ASLEEP, State.WEIGHTS_ONLY, State.AWAKE)
"""In the order of what they hold."""


class Phase(StrEnum):
    """A stretch of a step."""

    ROLLOUT = "rollout"
    """All devices answer prompts."""
    JUDGE = "judge"
    """All devices judge answers; only where there are generative reward models, in full colocation."""
    GENERATION = "generation"
    """Some devices answer, the others judge; partial colocation only."""
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
    """What is put to sleep and woken as one: an engine, or a training rank."""

    role: Role
    pool: str
    """`rollout`, `train`, or the judge's name: engines that do the same work."""
    index: int
    """Of the engine in its pool, or the rank."""
    devices: tuple[int, ...]
    """None of a judge that is a server elsewhere."""

    def __str__(self) -> str:
        """How errors call it."""
        if self.role is Role.TRAIN:
            return f"training rank {self.index}"
        return f"engine {self.index}" + (f" of judge {self.pool}" if self.role is Role.GENRM else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The units of a run and the devices that each of them uses."""

    units: tuple[Unit, ...]
    cells: tuple[tuple[int, ...], ...] = ()
    """[cell] devices that go to rollout or to GenRM together; empty in full colocation."""

    @property
    def is_partial(self) -> bool:
        """True when rollout and GenRM work side by side."""
        return bool(self.cells)

    def of_role(self, role: Role) -> tuple[Unit, ...]:
        """Its units."""
        return tuple(unit for unit in self.units if unit.role is role)

    def pools(self) -> dict[str, tuple[Unit, ...]]:
        """[pool] its units."""
        names = dict.fromkeys(unit.pool for unit in self.units)
        return {name: tuple(unit for unit in self.units if unit.pool == name) for name in names}

    def devices(self, role: Role) -> tuple[tuple[int, ...], ...]:
        """[unit of the role] device numbers."""
        return tuple(unit.devices for unit in self.of_role(role))

    def in_cell(self, cell: int, role: Role) -> tuple[Unit, ...]:
        """The role's units on the devices of a cell."""
        return tuple(unit for unit in self.of_role(role) if unit.devices and set(unit.devices) <= set(self.cells[cell]))

    def wanted(self, phase: Phase, rollout_cells: Iterable[int] = ()) -> dict[Unit, State]:
        """[unit] its state in a phase; `rollout_cells` answer in `GENERATION`, all others judge."""
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
    """Devices of each; 0 where they are servers elsewhere."""

    @property
    def num_devices(self) -> int:
        """Of all of them."""
        return self.num * self.tp


def full_colocation(*, num_devices: int, rollout: Engines, judges: Mapping[str, Engines]) -> Placement:
    """One training rank on every device; engines on the first devices, all judges' engines one after another."""
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
    """Every device has a training rank and a place in an engine of the policy, and in one of each judge.

    Judges that are servers elsewhere take no device and no part in the division.
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
    """Devices of a cell: those of the largest engine."""
    return max(engines.tp for engines in (rollout, *judges))


def _units(role: Role, pool: str, engines: Engines, *, first: int = 0) -> list[Unit]:
    """One after another, from device `first` on."""
    return [
        Unit(role=role, pool=pool, index=index, devices=tuple(range(begin, begin + engines.tp)))
        for index, begin in enumerate(first + index * engines.tp for index in range(engines.num))
    ]
