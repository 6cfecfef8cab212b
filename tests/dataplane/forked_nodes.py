"""Embedded nodes of tests, forked from a process that has loaded what they load: that takes a node 0.3 s and more.

A forked node runs the same command line, with the same pipes, environment and folder, as a child of the test's process.
Tests of how a node begins and ends have the real start (the fixture `started_nodes`), as have whole runs and commands.
What modules make while they load is the same in all forked nodes: the secret name of a node's own session, and hashes.
"""

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from dataplane.client import node_process

EARLY = ("LD_", "GLIBC_", "MALLOC_", "MIMALLOC_", "LC_", "LANG", "TZ", "PYTHON", "OMP_", "OPENBLAS_", "ARROW_", "GRPC_")
"""The beginnings of the names of variables that the system, Python or a library reads before a node's first line."""
SETTINGS = {"stdin", "stdout", "stderr", "cwd", "env", "start_new_session"}
"""The arguments of `subprocess.Popen` that `NodeProcess` gives. A forked node is started with these."""
MAX_REQUEST_BYTES = 1 << 20
DEADLINE_S = 60.0
READY = b"ready"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class NodeForker:
    """A process that forks nodes. It is started with the first of them, and ends with this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ours: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environ = dict(os.environ)

    def start(self, command: Sequence[str], **settings: Any) -> Any:
        """Do what `subprocess.Popen` does, for the arguments that `NodeProcess` gives it.

        A node that needs an environment of its own before it loads anything is not forked.
        """
        assert settings.keys() == SETTINGS and settings["start_new_session"]
        assert settings["stdin"] == settings["stdout"] == subprocess.PIPE
        is_usual = list(command[:4]) == [sys.executable, "-m", "dataplane", "serve"]
        if not is_usual or early(settings["env"]) != early(self._environ):
            return subprocess.Popen(command, **settings)
        return ForkedNode(self, command, settings)

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Fork a node with these standard streams, as a child of this process. Return its process id."""
        with self._lock:
            try:
                if self._ours is None:
                    self._start()
                assert self._ours is not None
                with adopting():
                    socket.send_fds(self._ours, [json.dumps(request).encode()], fds)
                    pid = self._ours.recv(64)
                assert pid and int(pid) > 0, f"the process that forks nodes answered {pid!r}; its errors are above"
                return int(pid)
            except BaseException:
                self.close()  # a reply that comes late would be taken for that to the next request
                raise

    def close(self) -> None:
        """End the process. The nodes that it forked go on, and the next request starts another one."""
        if self._ours is not None:
            self._ours.close()
        if self._process is not None:
            self._process.kill()  # it keeps nothing
            self._process.wait(DEADLINE_S)
        self._ours = self._process = None

    def _start(self) -> None:
        """Start the process, and wait until it has loaded what nodes load."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(DEADLINE_S)
        with theirs:
            command = [sys.executable, "-m", "tests.dataplane.forked_nodes", str(theirs.fileno())]
            folder = Path(__file__).resolve().parents[2]
            self._process = subprocess.Popen(
                command, cwd=folder, env=self._environ, pass_fds=[theirs.fileno()], start_new_session=True
            )
        assert self._ours.recv(64) == READY, "the process that forks nodes did not start; its errors are above"


class ForkedNode:
    """The process of a forked node, with what `NodeProcess` uses of `subprocess.Popen`. Thread-safe."""

    def __init__(self, forker: NodeForker, command: Sequence[str], settings: Mapping[str, Any]) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        errors = settings["stderr"]
        error_fd = 2 if errors is None else errors.fileno()
        request = {"arguments": list(command[3:]), "cwd": str(settings["cwd"]), "environ": dict(settings["env"])}
        try:
            self.pid = forker.fork(request, [theirs_in, theirs_out, error_fd])
        except BaseException:
            os.close(ours_in)
            os.close(ours_out)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self.stdin: IO[bytes] = os.fdopen(ours_in, "wb", 0)
        self.stdout: IO[bytes] = os.fdopen(ours_out, "rb", 0)
        self._lock = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None while the process runs."""
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the process has ended. Raises TimeoutExpired after `timeout` seconds."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the forked node", timeout or 0.0)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        with self._lock:
            if self._code is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


def early(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process cannot change for itself any more when its first line runs."""
    return {name: value for name, value in environ.items() if name.startswith(EARLY)}


@contextmanager
def adopting() -> Iterator[None]:
    """Become the parent of descendants that lose their own during a `with` block."""
    prctl, was = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, was.value)


@contextmanager
def forked_nodes() -> Iterator[None]:
    """Fork the nodes that this process starts during a `with` block."""
    forker = NodeForker()
    changed = SimpleNamespace(Popen=forker.start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node_process, "subprocess", changed)
            yield
    finally:
        forker.close()


def _serve(ours: socket.socket) -> None:
    """Fork a node for every request, until the owner has closed its end."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as a node does before it loads anything
    import dataplane.cli.serve  # noqa: F401  is what a node loads

    gc.freeze()  # nodes share what is there now
    ours.send(READY)
    while True:
        data, fds, _, _ = socket.recv_fds(ours, MAX_REQUEST_BYTES, 3)
        if not data:
            return
        said, says = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            try:
                if (node := os.fork()) != 0:
                    os.write(says, str(node).encode())
            finally:
                if os.getpid() == between:
                    os._exit(0)  # the node becomes a child of the owner
            ours.close()
            os.closerange(said, says + 1)
            _become_node(json.loads(data), fds, between)
            return
        for fd in (says, *fds):
            os.close(fd)
        os.waitpid(between, 0)
        ours.send(os.read(said, 64) or b"-1")  # nothing was written if the system lets no process begin
        os.close(said)


def _become_node(request: Mapping[str, Any], fds: Sequence[int], between: int) -> None:
    """Run the command line of `dataplane`, once the process `between` has ended."""
    while os.getppid() == between:
        time.sleep(0.001)
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv[1:] = request["arguments"]
    runpy.run_module("dataplane", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        _serve(ours)
