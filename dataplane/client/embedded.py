"""`EmbeddedNode`: run a data-plane node as a child process that ends together with the process that started it.

A node that dies without being stopped (killed, out of memory) is started again on the same port, with the same data
sets and the same disk folder, so that clients and readers can continue.
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
from dataplane.core.errors import NodeUnavailableError, OutOfSpaceError
from dataplane.core.hosts import new_node_id

START_TIMEOUT_S = 120.0
"""The time in seconds within which a started node must be ready."""
MAX_RESTARTS = 5
"""The maximum number of restarts within `RESTART_WINDOW_S`. A node that dies once more is not started again."""
RESTART_WINDOW_S = 60.0
"""The length in seconds of the time in which restarts are counted."""
_WATCH_S = 0.1
"""The seconds between two checks of the node's process."""
_FIRST_PAUSE_S = 1.0
"""The seconds to wait after a restart that failed: its port may still be taken, and the memory of the dead node not yet
free. After each further failure the wait is twice as long."""

log = logging.getLogger(__name__)


class EmbeddedNode:
    """A node in a child process, which runs `python -m dataplane serve`, on a loopback port unless it is told another
    address. The constructor waits until the node is ready.

    The node runs in a separate process session, so that Ctrl-C reaches only its owner. The node ends when this process
    ends (its standard input closes, and the operating system sends it a signal). `stop` ends exactly this node and
    removes its shared memory, even if the node was killed. With `restart`, a node that dies is started again, at most 5
    times in 60 s; after that `failure` is set, and `on_failure` is called with `failure` in a thread of this object.
    The waits between restarts that fail grow, to half a minute in all: as long as views of the dead node live, its
    memory is taken, and there may be no room for a second node.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        roots: Mapping[str, Sequence[str]],
        media_roots: Sequence[Path] = (),
        index_dir: Path | None = None,
        num_workers: int = 1,
        tmp_dir: str | None = None,
        node_id: str = "",
        host_id: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        restart: bool = True,
        on_failure: Callable[[NodeUnavailableError], None] | None = None,
        peers: Mapping[str, str] | None = None,
        directory: Path | None = None,
        spill_dir: Path | None = None,
        spill_bytes: int = 10 << 30,
        token_file: Path | None = None,
        log_file: Path | None = None,
    ) -> None:
        """`host`: the address at which the node listens. `token_file`: the tokens that clients must show; without it
        every local process may connect. `log_file`: where the node's log goes; without it, to the standard error of
        this process."""
        self._reservation = _reserve(host, port)
        self.uri = f"grpc://{host}:{self._reservation.getsockname()[1]}"
        self.num_restarts = 0
        """The number of times that the node was started again."""
        self.last_restart_s = 0.0
        """The seconds from the last death of the node until it was back."""
        self._died_s: float | None = None
        self.failure: NodeUnavailableError | None = None
        """The error that says why the node is not started again; None until the restarts are given up."""
        self._on_failure = on_failure
        self._command = [sys.executable, "-m", "dataplane", "serve", "--embedded"]
        self._command += ["--host", host, "--port", str(self._reservation.getsockname()[1])]
        self._command += ["--memory", str(memory_bytes), "--workers", str(num_workers)]
        self._command += [f"--node-id={node_id or new_node_id()}"] + [f"--host-id={host_id}"] * bool(host_id)
        for peer, uri in (peers or {}).items():
            self._command.append(f"--peer={peer}={uri}")
        self._command += [f"--directory={directory}"] * (directory is not None)
        for name, patterns in roots.items():
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                self._command += ["--root", f"{name}={absolute_pattern(pattern)}"]
        for folder in media_roots:
            self._command += ["--media-root", str(folder.absolute())]
        if index_dir is not None:
            self._command += ["--index-dir", str(index_dir.absolute())]
        if spill_dir is not None:
            self._command += ["--spill", str(spill_dir.absolute()), "--spill-size", str(spill_bytes)]
        if token_file is not None:
            self._command += ["--token-file", str(token_file.absolute())]
        self._environ = dict(os.environ) | ({"TMPDIR": tmp_dir} if tmp_dir else {})
        self._restarts: deque[float] = deque()
        self._troubles: list[Exception] = []
        """The errors of the restarts that failed since the node ran last."""
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._log_file = log_file
        self._process = NodeProcess(self._command, self._environ, log_file)
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
        """The process id of the node that runs now, or of the node that ran last."""
        return self._process.pid

    @property
    def segments(self) -> list[Path]:
        """The shared-memory files of the node that runs now, or of the node that ran last."""
        return self._process.segments

    def stop(self, timeout_s: float = 10) -> None:
        """Stop the node, even while it starts, and remove its segments. Kill the node if it still runs after
        `timeout_s`.

        This may be called twice.
        """
        self._stopping.set()
        with self._lock:  # after this line no node is started
            process = self._process
        process.end(timeout_s)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(timeout_s)
        process.remove()
        self._reservation.close()

    # -- private: the watcher's thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start the node again each time it dies, until `stop` is called or the node died too often."""
        while not self._stopping.wait(_WATCH_S):
            code = self._process.poll()
            if code is None:
                continue
            self._process.remove()
            now = time.monotonic()
            while self._restarts and self._restarts[0] < now - RESTART_WINDOW_S:
                self._restarts.popleft()
            if max(len(self._restarts), len(self._troubles)) >= MAX_RESTARTS:
                self._give_up(code)
                return
            self._restarts.append(now)
            self._died_s = self._died_s or now
            log.warning(
                "the data-plane node %d at %s ended with %s; it is started again", self.pid, self.uri, _ending(code)
            )
            self._start_again()

    def _start_again(self) -> None:
        """Start the node once; log the error if that fails, and leave the retry to `_watch`."""
        process = None
        try:
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = process = NodeProcess(self._command, self._environ, self._log_file)
            process.wait_until_ready(START_TIMEOUT_S)
        except Exception as error:  # a lasting error fails the next attempts too, and then the node is given up
            if process is not None:
                process.end(0)
                process.remove()
            if not self._stopping.is_set():
                log.warning("the data-plane node did not start again: %s", error)
                self._stopping.wait(_FIRST_PAUSE_S * 2 ** len(self._troubles))
                self._troubles.append(error)
            return
        self._troubles.clear()
        if self._died_s is not None:
            self.last_restart_s, self._died_s = time.monotonic() - self._died_s, None
        self.num_restarts += 1
        log.warning("the data-plane node at %s is back as %d (restart %d)", self.uri, self.pid, self.num_restarts)

    def _give_up(self, code: int) -> None:
        """Set `failure` from the exit code, log it, and call `on_failure`."""
        why = "look for what kills it (memory? dmesg says)"
        if self._troubles:
            why = f"the last start failed: {self._troubles[-1]}"
            if isinstance(self._troubles[-1], OutOfSpaceError):
                why += "; the memory of the dead node is taken until all views of it are dropped: drop them sooner, too"
        self.failure = NodeUnavailableError(
            f"the data-plane node at {self.uri} ended with {_ending(code)}, after {MAX_RESTARTS} restarts in "
            f"{RESTART_WINDOW_S:g} s; it is not started again: {why}"
        )
        log.error("%s", self.failure)
        if self._on_failure is not None:
            self._on_failure(self.failure)


def _reserve(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port of this machine's address `host`, to keep the port while the node
    restarts. For port 0 the system chooses a free port.

    The socket never listens, so the node can still listen on the port (both sockets have SO_REUSEADDR), and the system
    does not use the port for outgoing connections. Raises NodeUnavailableError if the port is taken.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reservation.bind((host, port))
    except OSError as error:
        reservation.close()
        raise NodeUnavailableError(
            f"port {port} of {host} is not available ({error.strerror}); choose another port, or an address of this "
            "machine"
        ) from error
    return reservation


def _ending(code: int) -> str:
    """Return text that says how a process ended, from its exit code; a negative code means a signal."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {next((known.name for known in signal.Signals if known == -code), -code)}"


def absolute_pattern(pattern: str) -> str:
    """Return a glob pattern of files as an absolute path, because the node has another working directory. URLs stay as
    they are."""
    return pattern if "://" in pattern else str(Path(pattern).expanduser().absolute())
