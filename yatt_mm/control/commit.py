"""The commit of a checkpoint that ranks are writing: as soon as every rank has written its part."""

from __future__ import annotations

import threading
import time
from typing import Any

from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.errors import WorkerError

POLL_S = 0.02


class Commit:
    """The commit of one checkpoint. A thread waits for the ranks and makes it."""

    def __init__(
        self, checkpoints: Checkpoints, step: int, state: dict[str, Any], *, num_ranks: int, best: int | None
    ) -> None:
        """`state`, `best`: see `Checkpoints.commit`."""
        self._checkpoints = checkpoints
        self._step = step
        self._state = state
        self._num_ranks = num_ranks
        self._best = best
        self.seconds = 0.0
        """The time from the begin of the save until the checkpoint was committed."""
        self._started_s = time.monotonic()
        self._error: Exception | None = None
        self._is_given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"commit of step {step}", daemon=True)
        self._thread.start()

    def finish(self, *, deadline_s: float) -> None:
        """Wait until the checkpoint is committed.

        Raises:
            DiskError: it could not be committed; the message names the file.
            WorkerError: it was not committed in `deadline_s` seconds.
        """
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._is_given_up.set()
            num = self._checkpoints.num_written(self._step)
            raise WorkerError(
                f"the checkpoint of step {self._step} was not committed in {deadline_s:g} s "
                f"(controllers.deadline_s): {num} of {self._num_ranks} training ranks have written their parts"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._checkpoints.num_written(self._step) < self._num_ranks:
                if self._is_given_up.wait(POLL_S):
                    return
            self._checkpoints.commit(self._step, self._state, best=self._best)
            self.seconds = time.monotonic() - self._started_s
        except Exception as error:  # it is raised in the thread that waits
            self._error = error
