"""What a supervisor and the launcher that it has started tell each other. No third-party package."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dataplane.core.process import signal_on_parent_death
from yatt_mm.reporting.fault_log import FaultLog

STATE_BYTES = 1 << 16
"""The size of the state's file."""
MAX_LOST = 1000
"""The most characters that say what was lost."""
START = "start"
"""The phase of a launcher whose controllers do not work yet."""
VARIABLE = "YATT_SUPERVISOR"
"""The variable of the environment that carries an `Order` to the launcher, and to no other process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherLoss:
    """Why an earlier launcher of the run was lost."""

    why: str
    phase: str
    step: int
    began_s: float
    """The time, in seconds since the epoch."""

    def note(self, run_dir: Path, done: str) -> None:
        """Write down that the launcher, or a part without which it cannot go on, was lost, and what was done."""
        FaultLog(run_dir).add(
            who="the launcher",
            role="launcher",
            phase=self.phase,
            step=self.step,
            why=self.why,
            done=done,
            seconds=time.time() - self.began_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the supervisor gives a launcher."""

    supervisor: int
    """The number of its process."""
    file: int
    """The file descriptor for the launcher's state."""
    started_s: float
    """The time at which the run was started first, in seconds since the epoch."""
    loss: LauncherLoss | None
    """Why the run is started again; None at its first start."""

    def text(self) -> str:
        """Return the value of `VARIABLE`."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherState:
    """How far a launcher came. Its supervisor reads it when the launcher is gone."""

    run_dir: str = ""
    """The run's folder; empty before it is prepared."""
    max_restarts: int = 0
    owned: tuple[str, ...] = ()
    """The paths, or beginnings of paths, of folders outside of its temporary one that end with the launcher."""
    began_at: int = 0
    """The newest step of which the run's folder may have had a checkpoint at its start."""
    step: int = -1
    """The last finished step."""
    phase: str = START
    lost: str = ""
    """What it saw dying, without which it cannot end in an orderly way."""
    is_fault: bool = True
    """False if nothing died: it is to be started again to use more hosts."""
    status: int | None = None
    """The exit status with which it came to its end; None if it did not. That of its process is another one if it
    crashed after it."""

    @classmethod
    def read(cls, file: int) -> LauncherState:
        """Return what a launcher wrote last."""
        text = os.pread(file, STATE_BYTES, 0)
        return cls(**json.loads(text)) if text else cls()


class Lifeline:
    """The launcher's side. Without a supervisor it does nothing."""

    def __init__(self) -> None:
        self.loss: LauncherLoss | None = None
        """Why the run was started again; None at its first start."""
        self.started_s = time.time()
        """The time at which the run was started first, in seconds since the epoch."""
        self._file: int | None = None
        self._state = LauncherState()

    def take_order(self) -> bool:
        """Take the order from the environment; return False if there is no supervisor. A launcher whose supervisor dies
        gets SIGTERM, so that it saves the run and stops."""
        text = os.environ.pop(VARIABLE, None)
        if text is None:
            return False
        order = json.loads(text)
        self.loss = None if order["loss"] is None else LauncherLoss(**order["loss"])
        self.started_s = order["started_s"]
        self._file = order["file"]
        os.set_inheritable(order["file"], False)
        signal_on_parent_death(signal.SIGTERM)
        if os.getppid() != order["supervisor"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    def tell(self, **news: Any) -> None:
        """Change fields of the state."""
        before, self._state = self._state, replace(self._state, **news)
        if self._file is not None and self._state != before:
            text = json.dumps({**asdict(self._state), "lost": self._state.lost[:MAX_LOST]})
            os.pwrite(self._file, text.encode().ljust(STATE_BYTES), 0)  # in one call: the process may end at any moment

    def end(self, why: str) -> None:
        """End this process at once, because it cannot end in an orderly way. Its supervisor ends what it has started.
        Without a supervisor, do nothing."""
        if self._file is not None:
            self.tell(lost=why)
            os.kill(os.getpid(), signal.SIGKILL)


LIFELINE = Lifeline()
"""The only instance of a process."""
