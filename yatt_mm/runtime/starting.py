"""Starts engines and training ranks, and tells people as they become ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from yatt_mm.common.ray_calls import wait_all
from yatt_mm.protocol.placement_model import Role, Unit


def start(
    units: Mapping[Unit, Any], store: str, *, in_turns: bool, deadline_s: float, tell: Callable[[str], None]
) -> None:
    """Start the actors of these units.

    `store`: where the training ranks meet. `in_turns`: True starts one pool after another, as on GPUs, where an engine
    takes its device's memory before it sleeps; training ranks load their modules meanwhile. `deadline_s`: the longest
    time until the next one is ready.

    Raises:
        WorkerError: an actor failed to start, or took too long.
    """
    pools: dict[str, list[Unit]] = {}
    for unit in units:
        pools.setdefault(unit.pool, []).append(unit)
    turns = list(pools.values())
    ready = _tell_when_ready([[str(unit) for unit in turn] for turn in turns], tell)
    if in_turns:
        for unit in units:
            if unit.role is Role.TRAIN:
                units[unit].load_modules.remote()
    for turn in turns if in_turns else [list(chain.from_iterable(turns))]:
        calls = [(str(unit), _start(unit, units[unit], store)) for unit in turn]
        wait_all(calls, what="its start", deadline_s=deadline_s, on_done=ready)


def _start(unit: Unit, actor: Any, store: str) -> Any:
    return actor.start.remote(store) if unit.role is Role.TRAIN else actor.start.remote()


def _tell_when_ready(groups: Sequence[Sequence[str]], tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that takes the name of each part that is ready, and tells when all of its group are."""
    started, missing = time.monotonic(), [set(names) for names in groups]

    def ready(name: str) -> None:
        for names, of_group in zip(groups, missing):
            if name in of_group:
                of_group.remove(name)
                if not of_group:
                    tell(f"{_together(names)}: ready after {time.monotonic() - started:.1f} s")

    return ready


def _together(names: Sequence[str]) -> str:
    """Return the names of parts that are numbered from 0 as one: `engine 0`, `engine 1` give `2 engines`."""
    if len(names) == 1:
        return names[0]
    kind, _, rest = names[0].partition(" 0")
    return f"{len(names)} {kind}s{rest}"
