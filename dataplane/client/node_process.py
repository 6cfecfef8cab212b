"""The process of an embedded node: start it, wait until it is ready, stop it, and remove its shared memory.

`embedded.py` makes a new `NodeProcess` for each restart.
"""

import json
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from dataplane.core.child_process import wait_for_killed
from dataplane.core.errors import ERRORS, DataPlaneError, NodeTimeoutError, NodeUnavailableError
from dataplane.core.shared_files import PRESENCE

log = logging.getLogger(__name__)

KILLED_S = 10.0
"""The time in seconds that a killed process has to end."""
MAX_SAID = 2000
"""The number of characters from the end of a node's log that an error shows."""


class NodeProcess:
    """The child process of an embedded node, started by the constructor. Thread-safe."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path | None = None) -> None:
        """`log`: the file to which the node's errors are appended; without it they go where this process's go."""
        self._log = log
        with nullcontext() if log is None else log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=Path(__file__).resolve().parents[2],
                env=environ,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.uri = ""
        """The address of the node; empty until the node is ready."""
        self.segments: list[Path] = []
        """The shared-memory files of the node; empty until the node is ready."""
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.poll()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the node is ready, and set `uri` and `segments`. If it ended with an error, raises that error.

        The call waits at most `timeout_s` for the line of JSON that the node prints, and then raises NodeTimeoutError.
        """
        assert self._process.stdout is not None
        fd, line = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise NodeTimeoutError(f"the data-plane node {self.pid} was not ready after {timeout_s:g} s")
            part = os.read(fd, 65536)
            if not part:
                code = self._wait_for_code(deadline)
                said = "see above" if self._log is None else self._log.read_text("utf-8", "replace")[-MAX_SAID:].strip()
                raise NodeUnavailableError(f"the data-plane node ended with code {code} before it was ready; {said}")
            line += part
        ready = json.loads(line)
        if "error" in ready:
            raise ERRORS.get(ready["error"], DataPlaneError)(ready["message"])
        self.uri = str(ready["uri"])
        self.segments = [Path(segment["path"]) for segment in ready["segments"]]

    def _wait_for_code(self, deadline: float) -> int:
        """Return the exit code of a process that has closed its output. Raises NodeTimeoutError at the deadline."""
        try:
            return self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise NodeTimeoutError(f"the data-plane node {self.pid} closed its output and does not end") from error

    def end(self, timeout_s: float) -> None:
        """Stop exactly this process; kill it if it still runs after `timeout_s`. Call `remove` afterwards."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                log.warning("node %d did not stop in %g s; it is killed", self.pid, timeout_s)
                self._process.kill()
                wait_for_killed(self._process, "node", KILLED_S)

    def remove(self) -> None:
        """Close the pipes of the process and unlink its segments. Call it only after the process has ended."""
        with self._lock:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            for path in self.segments:
                if not path.is_relative_to("/proc"):  # memory without a name is freed with its node
                    for left in (*path.parent.glob(f"{path.name}{PRESENCE}*"), path):
                        left.unlink(missing_ok=True)
