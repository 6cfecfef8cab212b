"""A node as a child of the process that wants one: it starts with it, and ends with it however it ends."""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dataplane.errors import ERRORS, DataPlaneError, NodeTimeoutError, NodeUnavailableError

START_TIMEOUT_S = 120.0

log = logging.getLogger(__name__)


class EmbeddedNode:
    """Starts `python -m dataplane serve` on a free loopback port and waits until it serves.

    The node lives in a session of its own, so that Ctrl-C reaches its owner first. It ends when this process ends (its
    standard input closes; the kernel signals it too), and `stop` ends exactly it and removes its shared memory, even if
    it was killed.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        roots: Mapping[str, Sequence[str]],
        num_workers: int = 1,
        tmp_dir: str | None = None,
        node_id: str = "",
        host_id: str = "",
    ) -> None:
        command = [sys.executable, "-m", "dataplane", "serve", "--embedded", "--port", "0"]
        command += ["--memory", str(memory_bytes), "--workers", str(num_workers)]
        command += [f"--node-id={node_id}"] * bool(node_id) + [f"--host-id={host_id}"] * bool(host_id)
        for name, patterns in roots.items():
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                command += ["--root", f"{name}={_absolute(pattern)}"]
        environ = dict(os.environ) | ({"TMPDIR": tmp_dir} if tmp_dir else {})
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parent.parent,
            env=environ,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._segments: list[Path] = []
        try:
            ready = self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        self.uri = str(ready["uri"])
        self._segments = [Path(segment["path"]) for segment in ready["segments"]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = 10) -> None:
        """End the node; kill it after `timeout_s`. Removes its segments. Safe to call twice."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                log.warning("node %d did not stop in %g s; it is killed", self.pid, timeout_s)
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        for path in self._segments:
            path.unlink(missing_ok=True)

    def _wait_until_ready(self) -> dict[str, Any]:
        """The one line that the node writes once it serves, or the error that it ended with."""
        assert self._process.stdout is not None
        fd, line = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not line.endswith(b"\n"):
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise NodeTimeoutError(f"the data-plane node {self.pid} was not ready after {START_TIMEOUT_S:g} s")
            part = os.read(fd, 65536)
            if not part:
                code = self._process.wait()
                raise NodeUnavailableError(f"the data-plane node ended with code {code} before it was ready; see above")
            line += part
        ready = json.loads(line)
        if "error" in ready:
            raise ERRORS.get(ready["error"], DataPlaneError)(ready["message"])
        return ready


def _absolute(pattern: str) -> str:
    """A local pattern as its owner means it, whatever the node's working directory."""
    return pattern if "://" in pattern else str(Path(pattern).expanduser().absolute())
