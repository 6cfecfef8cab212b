"""One life of an embedded node: the child process, the line it says when it serves, and the segments it leaves."""

import json
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dataplane.core.errors import ERRORS, DataPlaneError, NodeTimeoutError, NodeUnavailableError

log = logging.getLogger(__name__)


class NodeProcess:
    """Started by its construction; `end` ends exactly it. Thread-safe."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
            env=environ,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.segments: list[Path] = []
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Waits for: the one line that the node writes once it serves. Raises the error that it ended with."""
        assert self._process.stdout is not None
        fd, line = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise NodeTimeoutError(f"the data-plane node {self.pid} was not ready after {timeout_s:g} s")
            part = os.read(fd, 65536)
            if not part:
                code = self._process.wait()
                raise NodeUnavailableError(f"the data-plane node ended with code {code} before it was ready; see above")
            line += part
        ready = json.loads(line)
        if "error" in ready:
            raise ERRORS.get(ready["error"], DataPlaneError)(ready["message"])
        self.segments = [Path(segment["path"]) for segment in ready["segments"]]

    def end(self, timeout_s: float) -> None:
        """End it; kill it after `timeout_s`. `remove` what it leaves afterwards."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                log.warning("node %d did not stop in %g s; it is killed", self.pid, timeout_s)
                self._process.kill()
                self._process.wait()

    def remove(self) -> None:
        """Close its pipes and unlink its segments. Only after its end."""
        with self._lock:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            for path in self.segments:
                if not path.is_relative_to("/proc"):  # memory without a name goes with its node
                    path.unlink(missing_ok=True)
