"""Repairs of a run: what a fault took is made again, and other controllers go on from the last finished step.

Training ranks that were lost, or broken off in an update, load the newest checkpoint and are trained again on the
records of the steps since then. What cannot be repaired is raised.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yatt_mm.batching.rendezvous import Progress
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.errors import CheckpointError, PhaseAbortedError, RunLost, WorkerError, YattError
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.control import RunStart
from yatt_mm.protocol.placement_model import Role, Unit
from yatt_mm.reporting.fault_log import FaultLog
from yatt_mm.runtime.crew import Crew
from yatt_mm.runtime.losses import Settled, end_controllers, is_gone, settle

ABOUT_PARTS = (WorkerError, PhaseAbortedError)
"""The errors that say that a part of the run failed. Others say what is wrong with data, rewards or the disk."""
ENDING_S = 5.0
"""The seconds that controllers have to end themselves, once one of them has failed."""
MAX_WHY = 400
"""The number of characters of a reason that are shown and written down."""
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
        self._checkpoints = Checkpoints(root=config.run_dir / "checkpoints", keep=config.checkpoint.keep)
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
        progress = self._progress(error)
        self._crew.rendezvous.abort.remote(0, str(error))
        died = end_controllers(controllers, runs, within_s=ENDING_S)
        deadline_s = self._config.controllers.deadline_s
        settled = settle(self._crew.units, self._crew.done_by, deadline_s=deadline_s)
        no_keeper = self._crew.keeper is not None and is_gone(self._crew.keeper, deadline_s=REPLY_S)
        fault = self._fault(error, died, settled, no_keeper=no_keeper)
        at = {"phase": progress.phase, "step": progress.at_step}
        if not fault.who or self._is_too_often(progress):
            if fault.who:
                self._write(fault, at, done="ended the run", began=began)
            raise error
        self._tell(f"{' and '.join(fault.who)} failed in phase {progress.phase} of step {at['step']}: {fault.why}")
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
        restart = self._crew.rendezvous.restart.remote(self._crew.restart_count, start.step)
        wait_all([("the rendezvous", restart)], what="a restart", deadline_s=self._config.controllers.deadline_s)
        done = _what_is_done(lost, start)
        self._write(fault, at, done=done, began=began)
        self._tell(f"repaired after {time.monotonic() - began:.1f} s: {done}")
        return start

    def _progress(self, error: YattError) -> Progress:
        """Return how far the run has come. Raises RunLost if the rendezvous is lost, with what it knew."""
        call = self._crew.rendezvous.progress.remote()
        try:
            return wait_all([("the rendezvous", call)], what="saying how far the run is", deadline_s=REPLY_S)[0]
        except YattError as lost:
            raise RunLost(str(lost)) from error

    def _fault(self, error: YattError, died: Sequence[int], settled: Settled, *, no_keeper: bool) -> _Fault:
        who: dict[str, str] = {f"controller {c}": "controller" for c in died}
        who |= {str(unit): str(unit.role) for unit in settled.lost}
        if no_keeper:
            who["the keeper"] = "keeper"
        if self._crew.coordinator is not None and is_gone(self._crew.coordinator, deadline_s=REPLY_S):
            who["the coordinator"] = "coordinator"
        if not who and settled.silent:
            hangs = min(settled.silent, key=self._num_done)  # the others may wait for it
            who[str(hangs)] = str(hangs.role)
        return _Fault(who=tuple(who), role=next(iter(who.values()), ""), why=textwrap.shorten(str(error), MAX_WHY))

    def _num_done(self, unit: Unit) -> int:
        done = self._crew.done_by(unit)
        return -1 if done is None else done.count

    def _is_too_often(self, progress: Progress) -> bool:
        step = progress.step if progress.step is not None else self._start.step
        self._num_in_a_row = 1 if step > self._step else self._num_in_a_row + 1
        self._step = max(step, self._step)
        return self._num_in_a_row > self._config.faults.max_restarts

    def _where_to_go_on(self, error: YattError, progress: Progress, settled: Settled) -> RunStart:
        """Return from where controllers go on. Raises RunLost if the ranks cannot be brought there."""
        start = self._start
        if progress.step is not None:
            start = replace(start, step=progress.step, best=progress.best, is_begun=True)
        if settled.ranks_at is not None:
            return replace(start, checkpoint=None, ranks_at=settled.ranks_at)
        folder, ranks_at = start.checkpoint, self._start.ranks_at
        try:
            newest = self._checkpoints.newest(self._tell)
        except CheckpointError:
            newest = None
        if newest is not None:
            folder, ranks_at = str(newest.absolute()), int(Path(newest).name.removeprefix("step_"))
        covers = self._crew.rendezvous.covers.remote(ranks_at + 1, start.step)
        (is_covered,) = wait_all([("the rendezvous", covers)], what="looking into its journal", deadline_s=REPLY_S)
        if not is_covered:
            raise RunLost(f"{error} (the records since step {ranks_at} are too large to train new ranks on them again)")
        return replace(start, checkpoint=folder, ranks_at=ranks_at)

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
