"""The supervisor: the process that starts the launcher of a run, and is no part of Ray, so that it can report and clean
up when Ray dies, and start the run again.

Every process of a run descends from it. What loses its parent becomes its child: so it ends what a launcher that was
killed has left, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dataplane.core.process import adopt_descendants
from yatt_mm.common.owned_dirs import remove_orphans
from yatt_mm.common.streams import outliving_streams
from yatt_mm.hosts.scratch import remove_scratch_of_dead_runs
from yatt_mm.runtime.signals import INTERRUPTED, SAVED_AND_STOPPED, on_signals, signals_restored
from yatt_mm.runtime.supervised import START, VARIABLE, LauncherLoss, LauncherState, Order

LAUNCHER = ("-m", "yatt_mm.train")
"""What Python runs as the launcher."""
LOST = 70
"""The exit status of a launcher whose run has to be started again (`EX_SOFTWARE` of sysexits.h)."""
ENDED = "ended the run"
"""What `faults.jsonl` says of a loss that is not repaired."""
END_S = 20.0
"""The seconds in which what a launcher left must end after SIGTERM."""


def supervise(arguments: Sequence[str], resume: str | None) -> int:
    """Run `python -m yatt_mm.train` in a child process, and again if that was lost. Return its exit status.

    `arguments`: a config and overrides of its keys. `resume`: what `--resume` names.
    """
    adopt_descendants()
    supervisor = Supervisor(list(arguments), resume)
    with outliving_streams(), signals_restored():
        on_signals(supervisor.forward)
        return supervisor.run()


class Supervisor:
    """Runs one launcher after the other."""

    def __init__(self, arguments: list[str], resume: str | None) -> None:
        self._arguments = arguments
        self._resume = resume
        self._started_s = time.time()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._told = 0
        """The first signal that came; 0 if none did."""
        self._state = LauncherState()
        """That of the last launcher that was lost."""
        self._num_in_a_row = 0
        self._step = -1
        """The last finished step of the launchers that were lost."""

    def forward(self, signum: int, frame: object) -> None:
        """Give a signal to the launcher. That has a process group of its own, so no signal reaches it twice."""
        self._told = self._told or signum
        if self._launcher is not None and self._launcher.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._launcher.pid, signum)

    def run(self) -> int:
        """Run launchers until one comes to its end, and return its exit status."""
        loss = None
        while True:
            status, state = self._run_launcher(loss)
            began_s = time.time()
            _end_descendants()
            for folder in map(Path, state.owned):
                remove_orphans(folder.parent, folder.name)
            if state.status is not None and state.status != LOST:
                is_refused = state.phase == START and state.status not in (0, SAVED_AND_STOPPED, INTERRUPTED)
                if loss is not None and is_refused:
                    loss.note(Path(self._state.run_dir), ENDED)
                return state.status
            if not state.run_dir and self._state.run_dir:  # it died before it had the run's folder
                state = replace(self._state, phase=START, lost=state.lost, is_fault=state.is_fault)
            self._state = state
            if self._told:
                print("the run was told to stop, and ended before it was saved", file=sys.stderr)
                return INTERRUPTED if self._told == signal.SIGINT else SAVED_AND_STOPPED
            why = state.lost or f"the launcher {_how_it_ended(status)}"
            step = state.step if state.phase == "export" else state.step + 1
            loss = LauncherLoss(why=why, phase=state.phase, step=step, began_s=began_s)
            if not self._may_start_again(state):
                _give_up(state, loss)
                return 1
            print(
                f"{'fault: ' if state.is_fault else ''}{why}; the run starts again from its newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
            if _has_saved(Path(state.run_dir), state.began_at):
                self._resume = "auto"

    def _run_launcher(self, loss: LauncherLoss | None) -> tuple[int, LauncherState]:
        """Run one launcher to its end; return its exit status, or minus the signal that ended it, and its state."""
        file, resume = os.memfd_create("yatt-launcher"), [] if self._resume is None else [f"--resume={self._resume}"]
        try:
            order = Order(supervisor=os.getpid(), file=file, started_s=self._started_s, loss=loss)
            self._launcher = subprocess.Popen(
                [sys.executable, *LAUNCHER, *self._arguments, *resume],
                env={**os.environ, VARIABLE: order.text()},
                pass_fds=(file,),
                process_group=0,
            )
            if self._told:  # it came while there was no launcher
                self.forward(self._told, None)
            while True:
                pid, ended = os.waitpid(-1, 0)  # others are what lost its parent
                if pid == self._launcher.pid:
                    self._launcher.returncode = os.waitstatus_to_exitcode(ended)
                    return self._launcher.returncode, LauncherState.read(file)
        finally:
            os.close(file)

    def _may_start_again(self, state: LauncherState) -> bool:
        if not state.is_fault:
            return bool(state.run_dir)
        self._num_in_a_row = 1 if state.step > self._step else self._num_in_a_row + 1
        self._step = max(self._step, state.step)
        return bool(state.run_dir) and self._num_in_a_row <= state.max_restarts


def _end_descendants() -> None:
    """End what a launcher has left: all that descends from this process. Folders of dead owners are removed."""
    import psutil

    own = psutil.Process()
    for end in (psutil.Process.terminate, psutil.Process.kill):
        left = own.children(recursive=True)
        for process in left:
            try:
                end(process)
            except psutil.NoSuchProcess:
                continue
        deadline = time.monotonic() + END_S
        while (left := own.children(recursive=True)) and time.monotonic() < deadline:
            psutil.wait_procs(left, timeout=0.2)
    remove_scratch_of_dead_runs()


def _has_saved(run_dir: Path, began_at: int) -> bool:
    """Return True if a run has saved a checkpoint: one of a later step than `began_at`."""
    steps = [int(folder.name.removeprefix("step_")) for folder in (run_dir / "checkpoints").glob("step_*")]
    return max(steps, default=-1) > began_at


def _how_it_ended(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _give_up(state: LauncherState, loss: LauncherLoss) -> None:
    """Say, and write down, that the run ends."""
    print(f"error: {loss.why}", file=sys.stderr)
    if not state.run_dir:
        return
    loss.note(Path(state.run_dir), ENDED)
    print(
        f"faults.max_restarts is {state.max_restarts}; start {state.run_dir} again with --resume to go on from its "
        "newest checkpoint",
        file=sys.stderr,
    )
