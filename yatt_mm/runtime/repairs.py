"""Repairs of a run: what a fault took is made again, and other controllers go on from the last finished step.

Training ranks that were lost, or broken off in an update, load the newest checkpoint and are trained again on the
records of the steps since then. What cannot be repaired is raised.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from yatt_mm.batching.rendezvous import Progress
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.errors import (
    CheckpointError,
    PhaseAbortedError,
    RunLost,
    UnreachableError,
    WorkerError,
    YattError,
)
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.control import RunStart
from yatt_mm.protocol.placement_model import Role, Unit
from yatt_mm.reporting.fault_log import FaultLog
from yatt_mm.runtime.crew import Crew
from yatt_mm.runtime.losses import Settled, died_controllers, is_gone, settle

ABOUT_PARTS = (WorkerError, PhaseAbortedError)
"""The errors that say that a part of the run failed. Others say what is wrong with data, rewards or the disk."""
ENDING_S = 5.0
"""The seconds that controllers have to end themselves, once one of them has failed."""
MAX_WHY = 400
"""The number of characters of a reason that are shown and written down."""
HOSTS_REPLY_S = 30.0
"""The seconds in which every other host must reply: its link may have been down for a moment."""
REPLY_S = 10.0
"""The seconds in which an actor that has nothing to do must reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    who: tuple[str, ...]
    """The names of what was lost."""
    role: str
    why: str


class Repairs:
    """Repairs one run, again and again, as long as steps are finished in between."""

    def __init__(self, crew: Crew, config: Config, start: RunStart, tell: Callable[[str], None]) -> None:
        """`start`: where the run began. `tell` gets lines for people."""
        self._crew = crew
        self._config = config
        self._start = start
        self._tell = tell
        self._log = FaultLog(config.run_dir)
        self._checkpoints = Checkpoints.of_run(config.run_dir, keep=config.checkpoint.keep)
        self._step = start.step - 1
        """The last finished step at the last fault."""
        self._num_in_a_row = 0

    def repair(self, error: YattError, controllers: Sequence[Any], runs: Sequence[Any]) -> RunStart:
        """Make again what was lost, and return from where other controllers go on. `error`: that of the first
        controller that failed. `runs`: the calls in which controllers run.

        Raises:
            RunLost: the run has to be started again.
            YattError: the given error, if nothing was lost, or it happens too often.
        """
        if not isinstance(error, ABOUT_PARTS):
            raise error
        began = time.monotonic()
        self._crew.hosts.require(deadline_s=HOSTS_REPLY_S)
        where = self._progress(error)
        self._crew.rendezvous.abort.remote(0, str(error))
        died = {*died_controllers(runs, within_s=ENDING_S), *where.late}
        has_coordinator = not is_gone(self._crew.coordinator, deadline_s=REPLY_S)
        self._crew.end_controllers(controllers)
        progress = self._progress(error)  # one that ended itself may have finished the step
        deadline_s = self._config.controllers.deadline_s
        settled = settle(self._crew.units, self._crew.done_by, deadline_s=deadline_s)
        no_keeper = self._crew.keeper is not None and is_gone(self._crew.keeper, deadline_s=deadline_s)
        lost_names = {f"controller {c}": "controller" for c in sorted(died)}
        lost_names |= {} if has_coordinator else {"the coordinator": "coordinator"}
        lost_names |= {"the keeper": "keeper"} if no_keeper else {}
        fault = self._fault(error, lost_names, settled)
        at = {"phase": where.phase, "step": where.at_step}
        if not fault.who or self._is_too_often(progress):
            if fault.who:
                self._write(fault, at, done="ended the run", began=began)
            raise error
        self._tell(f"{' and '.join(fault.who)} failed in phase {where.phase} of step {where.at_step}: {fault.why}")
        start = self._where_to_go_on(error, progress, settled)
        self._crew.write_stacks(settled.silent)
        lost = set(settled.lost)
        if settled.ranks_at is None:
            lost |= {unit for unit in self._crew.units if unit.role is Role.TRAIN}
        try:
            self._crew.make_again(lost, keeper=no_keeper)
        except YattError as another:
            raise RunLost(f"{another} (while the run was repaired)") from error
        self._checkpoints.clear_partial()
        self._ask(error, self._crew.rendezvous.restart.remote(self._crew.restart_count, start.step))
        done = _what_is_done(lost, start)
        self._write(fault, at, done=done, began=began)
        self._tell(f"repaired after {time.monotonic() - began:.1f} s: {done}")
        return start

    def _progress(self, error: YattError) -> Progress:
        """Return how far the run has come."""
        progress: Progress = self._ask(error, self._crew.rendezvous.progress.remote())
        return progress

    def _ask(self, error: YattError, call: Any) -> Any:
        """Return what the rendezvous replies. Raises RunLost if it is lost, with what it knew."""
        try:
            return wait_all([("the rendezvous", call)], what="taking part in a repair", deadline_s=REPLY_S)[0]
        except YattError as lost:
            raise RunLost(str(lost)) from error

    def _fault(self, error: YattError, lost: Mapping[str, str], settled: Settled) -> _Fault:
        """Return who failed. `lost`: the roles of lost actors that are neither engines nor ranks, by their names."""
        who = {**lost, **{str(unit): str(unit.role) for unit in settled.lost}}
        if not who and settled.silent:
            done = self._crew.done_by(settled.silent)
            hangs = min(settled.silent, key=lambda unit: done[unit].count if unit in done else -1)  # others wait for it
            who[str(hangs)] = str(hangs.role)
        if not who and isinstance(error, UnreachableError):
            who["a connection"] = "network"
        return _Fault(who=tuple(who), role=next(iter(who.values()), ""), why=textwrap.shorten(str(error), MAX_WHY))

    def _is_too_often(self, progress: Progress) -> bool:
        step = progress.step if progress.step is not None else self._start.step
        self._num_in_a_row = 1 if step > self._step else self._num_in_a_row + 1
        self._step = max(step, self._step)
        return self._num_in_a_row > self._config.faults.max_restarts

    def _where_to_go_on(self, error: YattError, progress: Progress, settled: Settled) -> RunStart:
        """Return from where controllers go on. Raises RunLost if the ranks cannot be brought there."""
        start = self._start
        if progress.step is not None:
            start = replace(start, step=progress.step, best=progress.best, kl_coef=progress.kl_coef, is_begun=True)
        if settled.ranks_at is not None and self._covers(error, settled.ranks_at, start.step):
            return replace(start, checkpoint=None, ranks_at=settled.ranks_at)
        folder, ranks_at = start.checkpoint, self._start.ranks_at
        try:
            newest = self._checkpoints.newest(self._tell)
        except CheckpointError:
            newest = None
        if newest is not None and (saved := int(newest.name.removeprefix("step_"))) >= ranks_at:
            folder, ranks_at = str(newest.absolute()), saved
        if not self._covers(error, ranks_at, start.step):
            raise RunLost(f"{error} (the records since step {ranks_at} are too large to train new ranks on them again)")
        return replace(start, checkpoint=folder, ranks_at=ranks_at)

    def _covers(self, error: YattError, ranks_at: int, step: int) -> bool:
        """Return True if ranks with the weights of `ranks_at` can be trained again until `step`. New ones that have not
        loaded the checkpoint yet may not."""
        return bool(self._ask(error, self._crew.rendezvous.covers.remote(ranks_at + 1, step)))

    def _write(self, fault: _Fault, at: dict[str, Any], *, done: str, began: float) -> None:
        self._log.add(
            who=" and ".join(fault.who),
            role=fault.role,
            **at,
            why=fault.why,
            done=done,
            seconds=time.monotonic() - began,
        )


def _what_is_done(lost: set[Unit], start: RunStart) -> str:
    again = [str(unit) for unit in lost if unit.role is not Role.TRAIN]
    if any(unit.role is Role.TRAIN for unit in lost):
        again.append(f"all training ranks (from step {start.ranks_at})")
    made = f"{', '.join(again)} started again; " if again else ""
    return f"{made}controllers go on after step {start.step}"
