"""Finds which parts of a run a fault took, and puts the others to sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from yatt_mm.common.errors import UnreachableError, WorkerError
from yatt_mm.common.progress import Done
from yatt_mm.common.ray_calls import fetch
from yatt_mm.protocol.placement_model import Role, Unit

POLL_S = 0.1
OTHERS_S = 20.0
"""The seconds that training ranks get, also once one of them has replied. One that needs longer then waits for a rank
that is not there."""
ENGINE_S = 60.0
"""The seconds in which an engine must fall asleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What is left of the engines and ranks. They are asleep."""

    lost: Mapping[Unit, str]
    """Those that are of no use any more, with the reason."""
    ranks_at: int | None
    """The step whose update the weights of all ranks have; None if they have to be made again."""
    silent: frozenset[Unit]
    """Those that did not reply. They hang, or wait for one that does. None if a rank's update failed: the others wait
    for that one then."""


def settle(
    units: Mapping[Unit, Any], done_by: Callable[[Collection[Unit]], Mapping[Unit, Done]], *, deadline_s: float
) -> Settled:
    """Let every unit end what it is doing and sleep. One that cannot is lost, and so is one that takes too long: a rank
    if no rank finishes anything for `deadline_s`, an engine after `ENGINE_S`. `done_by`: what units have done."""
    calls = {actor.settle.remote(): unit for unit, actor in units.items()}
    waiting, lost, steps, silent = list(calls), dict[Unit, str](), dict[Unit, int | None](), set[Unit]()
    began_s, first_s, has_failed = time.time(), 0.0, False
    while waiting:
        done, waiting = ray.wait(waiting, timeout=POLL_S)
        for call in done:
            unit, step = calls[call], None
            try:
                step = fetch(call, name=str(unit), what="ending what it was doing")
            except UnreachableError:  # it may be at work
                again = units[unit].settle.remote()
                calls[again] = unit
                waiting.append(again)
                continue
            except WorkerError as error:
                lost[unit] = str(error)
            if unit.role is Role.TRAIN:
                steps[unit] = step
                has_failed |= step is None and unit not in lost
                first_s = first_s or time.time()
        last_s = {unit: done.last_s for unit, done in done_by({calls[call] for call in waiting}).items()}
        for call in waiting:
            unit = calls[call]
            if unit.role is not Role.TRAIN:
                limit_s = began_s + ENGINE_S
            elif None in steps.values():
                limit_s = 0.0  # with one that is of no use, all of them are
            elif steps:
                limit_s = max(first_s, last_s.get(unit, 0.0)) + OTHERS_S
            else:
                newest_s = max((last_s.get(unit, 0.0) for unit in units if unit.role is Role.TRAIN), default=0.0)
                limit_s = max(began_s + OTHERS_S, newest_s + deadline_s)
            if time.time() > limit_s:
                silent.add(unit)
        for unit in silent - lost.keys() - steps.keys():
            if unit.role is Role.TRAIN:
                steps[unit] = None
            else:
                lost[unit] = f"{unit} did not end what it was doing in {ENGINE_S:g} s"
        waiting = [call for call in waiting if calls[call] not in silent]
    at = set(steps.values())
    ranks_at = at.pop() if len(at) == 1 else None
    return Settled(lost=lost, ranks_at=ranks_at, silent=frozenset(() if has_failed else silent))


def is_gone(actor: Any, *, deadline_s: float) -> bool:
    """Return True if an actor has died, or has not replied after `deadline_s` seconds."""
    call = actor.__ray_ready__.remote()
    done, _ = ray.wait([call], timeout=deadline_s)
    if not done:
        return True
    try:
        ray.get(call)
    except ray.exceptions.RayError:
        return True
    return False


def died_controllers(runs: Sequence[Any], *, within_s: float) -> list[int]:
    """Return the numbers of the controllers that have died, of those whose `runs` end `within_s` seconds."""
    done, _ = ray.wait(list(runs), num_returns=len(runs), timeout=within_s)
    return [c for c, run in enumerate(runs) if run in done and _has_died(run)]


def _has_died(run: Any) -> bool:
    try:
        ray.get(run)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.RayError:
        return False
    return False
