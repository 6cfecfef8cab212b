"""Runs in which processes are killed when the controllers come to a phase."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.yatt_mm import runs

PATTERNS = {
    "node": "dataplane serve --embedded",
    "decode worker": "derive.worker_main",
    "reward worker": "ray::RewardActor",
    "rollout actor": "ray::RolloutActor",
    "engine core": runs.ENGINE,
    "judge": "ray::JudgeActor",
    "rank": "ray::TrainActor",
    "controller": "ray::ControllerActor",
    "keeper": "ray::KeeperActor",
    "coordinator": "ray::Coordinator",
    "rendezvous": "ray::Rendezvous",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
    "launcher": "yatt_mm.train",
}
"""[role] what the command line of its processes contains."""
WORKERS = ("decode worker", "reward worker")
"""Roles that are replaced by those that give them work: the controllers go on."""
WHEN_NEEDED = ("decode worker",)
"""Roles whose processes are replaced when there is something to do for them, so there may be none in a phase."""
PHASES = Path(__file__).parent / "phases"
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A process that is killed once."""

    role: str
    step: int
    phase: str
    """A phase, or `finished`: when a controller has finished a group of the step."""
    after_s: float = 0.1
    """The seconds after the controllers came to the phase."""
    folder: Path | None = None
    """A checkpoint that is being written. The process is killed when it is there, and no rank finishes it before."""
    signal: signal.Signals = signal.SIGKILL
    act: Callable[[], None] | None = None
    """What ends something that is no process of the run."""


class Killer:
    """Kills processes of one run, one after the other. A thread."""

    def __init__(self, mark: str, phases: Path, kills: list[Kill]) -> None:
        self.done: list[Kill] = []
        self._error: Exception | None = None
        self._mark = mark
        self._phases = phases
        self._kills = kills
        self._before: set[str] = set()
        """The processes of the controllers before the last kill."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer")
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Raises what it raised."""
        self._is_over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for kill in self._kills:
                if not self._wait_for(kill):
                    return
                self._do(kill)
        except Exception as error:
            if not self._is_over.is_set():  # else what it looked for has ended with the run
                self._error = error

    def _do(self, kill: Kill) -> None:
        if kill.act is not None:
            kill.act()
            self.done.append(kill)
            return
        came_s = time.monotonic()
        while not self._is_over.is_set():
            pid = _process_of(self._mark, kill.role)  # which takes a while: there are many processes
            if pid is None:
                return
            time.sleep(max(0.0, came_s + kill.after_s - time.monotonic()))
            while kill.folder is not None and not kill.folder.is_dir() and not self._is_over.wait(POLL_S / 10):
                pass
            with suppress(ProcessLookupError):  # it has ended by itself, and there may be another one
                os.kill(pid, kill.signal)
                self.done.append(kill)
                return

    def _wait_for(self, kill: Kill) -> bool:
        """Return True when controllers come to the phase: other ones than before, if these died with the last kill."""
        last = self.done[-1] if self.done else None
        is_same_phase = last is not None and (last.step, last.phase) == (kill.step, kill.phase)
        is_again = is_same_phase and last.role not in WORKERS
        while not self._is_over.wait(POLL_S):
            lines = [line.split() for line in self._phases.read_text().splitlines() if line.count(" ") == 2]
            came = {pid for step, phase, pid in lines if (int(step), phase) == (kill.step, kill.phase)}
            if came - (self._before if is_again else set()):
                self._before = {pid for _, _, pid in lines}
                return True
        return False


def _process_of(mark: str, role: str) -> int | None:
    """Return a process of this role, or None if there is none and it is one of `WHEN_NEEDED`."""
    if role == "decode worker":
        node = psutil.Process(runs.wait_for_process(mark, PATTERNS["node"].replace(" ", r"\W"), deadline_s=20))
        for child in node.children():
            with suppress(psutil.NoSuchProcess):  # also one that was killed, and is not missed yet
                if any(PATTERNS[role] in part for part in child.cmdline()):
                    return child.pid
        return None
    pid = runs.wait_for_process(mark, PATTERNS[role].replace(" ", r"\W"), deadline_s=20)
    if role == "launcher":  # or what was found is its supervisor
        found, title = psutil.Process(pid), PATTERNS[role]
        (pid,) = (
            one.pid
            for one in (found, *found.children())
            if title in one.cmdline() and title in psutil.Process(one.ppid()).cmdline()
        )
    return pid


def run(
    command: list[str],
    kills: list[Kill],
    *,
    came: list[str] | None = None,
    deadline_s: float = runs.DEADLINE_S,
) -> tuple[runs.Finished, list[Kill]]:
    """Run the command to its end, and return the result and which of the kills took place. `came` gets a line for each
    phase to which a controller came: step, phase, and the number of its process; and one for each finished group that
    the rendezvous has: step, `landed`, the number of the controller's process, position, and the name of its record."""
    before = runs.shared_memory()
    with (
        tempfile.TemporaryDirectory(prefix="yt-") as temporary,
        tempfile.TemporaryDirectory(prefix="yn-") as notes,
        pytest.MonkeyPatch.context() as patch,
    ):
        phases = Path(notes) / "phases"
        phases.touch()
        patch.setenv("PYTHONPATH", str(PHASES))
        patch.setenv("YATT_TEST_PHASES", str(phases))
        for folder in {kill.folder for kill in kills if kill.folder is not None}:
            patch.setenv("YATT_TEST_HELD", str(folder))
        with runs.started(command, temporary=Path(temporary)) as (process, mark):
            killer = Killer(mark, phases, kills)
            try:
                return runs.finish(process, mark, before, Path(temporary), deadline_s=deadline_s), killer.done
            finally:
                killer.stop()
                if came is not None:
                    came += phases.read_text().splitlines()


def faults(run_dir: Path) -> list[dict[str, Any]]:
    """Return what a run wrote down of its faults."""
    return [json.loads(line) for line in (run_dir / "faults.jsonl").read_text().splitlines()]
