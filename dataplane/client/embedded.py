"""A node as a child of the process that wants one: it starts with it, and ends with it however it ends.

A node that dies without having been told to (killed, out of memory) is started again on its port, with its roots and
its disk, so that clients and readers go on where they were.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from dataplane.client.node_process import NodeProcess
from dataplane.core.errors import NodeUnavailableError
from dataplane.core.hosts import new_node_id

START_TIMEOUT_S = 120.0
MAX_RESTARTS = 5
"""More within `RESTART_WINDOW_S` and the node is given up: something is wrong that starting again does not mend."""
RESTART_WINDOW_S = 60.0
_WATCH_S = 0.1
_RETRY_S = 0.5

log = logging.getLogger(__name__)


class EmbeddedNode:
    """Starts `python -m dataplane serve` on a loopback port and waits until it serves.

    The node lives in a session of its own, so that Ctrl-C reaches its owner first. It ends when this process ends (its
    standard input closes; the kernel signals it too), and `stop` ends exactly it and removes its shared memory, even if
    it was killed. With `restart` one that dies is started again, at most 5 times in 60 s; then `failure` says why not,
    and `on_failure` is called with it, in a thread of this object.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        roots: Mapping[str, Sequence[str]],
        media_roots: Sequence[Path] = (),
        num_workers: int = 1,
        tmp_dir: str | None = None,
        node_id: str = "",
        host_id: str = "",
        port: int = 0,
        restart: bool = True,
        on_failure: Callable[[NodeUnavailableError], None] | None = None,
        peers: Mapping[str, str] | None = None,
        directory: Path | None = None,
        spill_dir: Path | None = None,
        spill_bytes: int = 10 << 30,
    ) -> None:
        self._reservation = _reserve(port)
        self.uri = f"grpc://127.0.0.1:{self._reservation.getsockname()[1]}"
        self.num_restarts = 0
        """How often it was started again."""
        self.failure: NodeUnavailableError | None = None
        """Why it is not started again any more."""
        self._on_failure = on_failure
        self._command = [sys.executable, "-m", "dataplane", "serve", "--embedded"]
        self._command += ["--port", str(self._reservation.getsockname()[1])]
        self._command += ["--memory", str(memory_bytes), "--workers", str(num_workers)]
        self._command += [f"--node-id={node_id or new_node_id()}"] + [f"--host-id={host_id}"] * bool(host_id)
        for peer, uri in (peers or {}).items():
            self._command.append(f"--peer={peer}={uri}")
        self._command += [f"--directory={directory}"] * (directory is not None)
        for name, patterns in roots.items():
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                self._command += ["--root", f"{name}={_absolute(pattern)}"]
        for folder in media_roots:
            self._command += ["--media-root", str(folder.absolute())]
        if spill_dir is not None:
            self._command += ["--spill", str(spill_dir.absolute()), "--spill-size", str(spill_bytes)]
        self._environ = dict(os.environ) | ({"TMPDIR": tmp_dir} if tmp_dir else {})
        self._restarts: deque[float] = deque()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._process = NodeProcess(self._command, self._environ)
        try:
            self._process.wait_until_ready(START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        if restart:
            self._watcher = threading.Thread(target=self._watch, name="node-watcher", daemon=True)
            self._watcher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the node that runs now, or ran last."""
        return self._process.pid

    @property
    def segments(self) -> list[Path]:
        """Shared memory of the node that runs now, or ran last."""
        return self._process.segments

    def stop(self, timeout_s: float = 10) -> None:
        """End the node, also in the middle of a start; kill it after `timeout_s`. Removes its segments.

        Safe to call twice.
        """
        self._stopping.set()
        with self._lock:  # from here on nothing is started
            process = self._process
        process.end(timeout_s)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(timeout_s)
        process.remove()
        self._reservation.close()

    # -- private: the watcher's thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Waits for: the end of the node. Starts another, until told to stop or it died too often."""
        while not self._stopping.wait(_WATCH_S):
            code = self._process.poll()
            if code is None:
                continue
            self._process.remove()
            now = time.monotonic()
            while self._restarts and self._restarts[0] < now - RESTART_WINDOW_S:
                self._restarts.popleft()
            if len(self._restarts) >= MAX_RESTARTS:
                self._give_up(code)
                return
            self._restarts.append(now)
            log.warning(
                "the data-plane node %d at %s ended with %s; it is started again", self.pid, self.uri, _ending(code)
            )
            self._start_again()

    def _start_again(self) -> None:
        process = None
        try:
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = process = NodeProcess(self._command, self._environ)
            process.wait_until_ready(START_TIMEOUT_S)
        except Exception as error:  # whatever it is, the next try meets it too, and then the node is given up
            if process is not None:
                process.end(0)
                process.remove()
            if not self._stopping.is_set():
                log.warning("the data-plane node did not start again: %s", error)
                self._stopping.wait(_RETRY_S)  # its port may still be taken, its memory not given back
            return
        self.num_restarts += 1
        log.warning("the data-plane node at %s is back as %d (restart %d)", self.uri, self.pid, self.num_restarts)

    def _give_up(self, code: int) -> None:
        self.failure = NodeUnavailableError(
            f"the data-plane node at {self.uri} ended with {_ending(code)}, after {MAX_RESTARTS} restarts in "
            f"{RESTART_WINDOW_S:g} s; it is not started again: look for what kills it (memory? dmesg says)"
        )
        log.error("%s", self.failure)
        if self._on_failure is not None:
            self._on_failure(self.failure)


def _reserve(port: int) -> socket.socket:
    """A bound socket that never listens: the port stays ours between two lives of the node.

    The kernel lets a node listen beside it (both have SO_REUSEADDR) and gives the port to no outgoing connection.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind(("127.0.0.1", port))
    except OSError as error:
        reservation.close()
        raise NodeUnavailableError(f"port {port} is taken on 127.0.0.1 ({error.strerror}); choose another") from error
    return reservation


def _ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {next((known.name for known in signal.Signals if known == -code), -code)}"


def _absolute(pattern: str) -> str:
    """A local pattern as its owner means it, whatever the node's working directory."""
    return pattern if "://" in pattern else str(Path(pattern).expanduser().absolute())
