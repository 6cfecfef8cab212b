"""Embedded nodes of tests, forked from a process that has loaded what they load: that takes a node 0.3 s and more.

A forked node runs the same command line, with the same pipes, environment and folder, as a child of the test's process.
Tests of how a node begins and ends have the real start (the fixture `started_nodes`), as have whole runs and commands.
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

OF_THE_LOADER = ("LD_", "PYTHON", "MALLOC_", "OPENBLAS_", "GRPC_")
"""How the names of those variables begin that the system, Python and libraries read before a node's first line."""
MAX_REQUEST_BYTES = 1 << 20
DEADLINE_S = 60.0
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
        environ = settings["env"]
        if list(command[1:4]) != ["-m", "dataplane", "serve"] or self._early(environ) != self._early(self._environ):
            return subprocess.Popen(command, **settings)
        return ForkedNode(self, command, settings)

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Fork a node with these standard streams, as a child of this process. Return its process id."""
        with self._lock:
            if self._ours is None:
                self._start()
            assert self._ours is not None
            with adopting():
                socket.send_fds(self._ours, [json.dumps(request).encode()], fds)
                return int(self._ours.recv(64))

    def close(self) -> None:
        """End the process. The nodes that it forked go on."""
        if self._ours is not None and self._process is not None:
            self._ours.close()
            self._process.wait(DEADLINE_S)

    def _start(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(DEADLINE_S)
        with theirs:
            command = [sys.executable, "-m", "tests.dataplane.forked_nodes", str(theirs.fileno())]
            folder = Path(__file__).resolve().parents[2]
            self._process = subprocess.Popen(command, cwd=folder, env=self._environ, pass_fds=[theirs.fileno()])

    @staticmethod
    def _early(environ: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environ.items() if name.startswith(OF_THE_LOADER)}


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
    while True:
        data, fds, _, _ = socket.recv_fds(ours, MAX_REQUEST_BYTES, 3)
        if not data:
            return
        said, says = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if (node := os.fork()) == 0:
                ours.close()
                os.closerange(said, says + 1)
                _become_node(json.loads(data), fds, between)
                return
            os.write(says, str(node).encode())
            os._exit(0)  # the node becomes a child of the owner
        os.waitpid(between, 0)
        ours.send(os.read(said, 64))
        for fd in (said, says, *fds):
            os.close(fd)


def _become_node(request: Mapping[str, Any], fds: Sequence[int], between: int) -> None:
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
