"""A decode worker that was taken over: its kernel `rgb` does what the text `attack` in a PNG says, with the same rights
as a decoder that runs code of a hostile file. The result of the kernel is a JSON text in 64 KiB."""

import ctypes
import errno
import gc
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dataplane.derive.worker_main import Worker, main
from dataplane.derive.worker_settings import WorkerSettings
from dataplane.media import recipes
from dataplane.media.recipes.kernel import Plan
from dataplane.media.recipes.rgb import Rgb

NUM_BYTES = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)
_CLONE3, _IO_URING_SETUP, _PIDFD_OPEN = 435, 425, 434  # the same numbers on all machines


class Hostile(Rgb):
    """The recipe of `rgb` with another kernel."""

    def plan(self, source: Image.Image) -> Plan:
        """Return a plan whose writing is the attack; an attack on the plan itself happens now."""
        attack, argument = source.info.get("attack", ""), source.info.get("argument", "")
        if attack == "frame instead of a plan":
            _send_and_wait(argument)

        def write(out: np.ndarray) -> None:
            out[:] = 0
            result = json.dumps(_ATTACKS[attack](out, argument)).encode() if attack else b"{}"
            out[: len(result)] = np.frombuffer(result, np.uint8)

        return Plan(shape=(NUM_BYTES,), meta={}, pixel_bytes=0, write=write)


def _overwrite(out: np.ndarray, argument: str) -> Any:
    """Fill all the memory that the result is part of."""
    whole = out
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    whole[:] = 0xEE
    return whole.nbytes


def _crash(out: np.ndarray, argument: str) -> None:
    ctypes.string_at(0)


def _send_and_wait(frame: str) -> None:
    worker = next(found for found in gc.get_objects() if isinstance(found, Worker))
    worker._connection.send_bytes(frame.encode())
    time.sleep(300)


def _call(name: str, *arguments: Any) -> None:
    found = getattr(_libc, name)(*arguments) if name != "syscall" else _libc.syscall(*map(ctypes.c_long, arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), name)


def _try_calls(out: np.ndarray, argument: str) -> dict[str, str]:
    """Try calls that no decoder needs, and return the name of each error, or an empty string for a call that
    worked."""
    node, memory = os.getppid(), ctypes.create_string_buffer(4096)
    attempts: dict[str, Callable[[], object]] = {
        "open the arena to write": lambda: os.open(argument, os.O_RDWR),
        "open the arena to read": lambda: os.open(argument, os.O_RDONLY),
        "open the node's memory": lambda: os.open(f"/proc/{node}/mem", os.O_RDWR),
        "open a file": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "create a file": lambda: os.open("/tmp/of-a-hostile-worker", os.O_WRONLY | os.O_CREAT),
        "list a folder": lambda: os.scandir("/dev/shm"),
        "look at a file": lambda: Path(argument).stat(),
        "remove a file": lambda: Path(argument).unlink(),
        "move a file": lambda: Path(argument).rename("/dev/shm/other"),
        "cut a file": lambda: os.truncate(argument, 0),
        "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "open a local socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
        "start a program": lambda: os.execv(sys.executable, [sys.executable, "-c", "pass"]),
        "fork": os.fork,
        "signal the node": lambda: os.kill(node, signal.SIGTERM),
        "signal a thread of the node": lambda: _call("tgkill", node, node, 0),
        "trace": lambda: _call("ptrace", 16, node, None, None),
        "read the node's memory": lambda: _call("process_vm_readv", node, memory, 1, memory, 1, 0),
        "write the node's memory": lambda: _call("process_vm_writev", node, memory, 1, memory, 1, 0),
        "get a handle of the node": lambda: _call("syscall", _PIDFD_OPEN, node, 0),
        "raise a limit": lambda: _call("setrlimit", resource.RLIMIT_AS, memory),
        "mount": lambda: _call("mount", b"none", b"/mnt", b"tmpfs", 0, None),
        "leave namespaces": lambda: _call("unshare", 0x10000000),
        "set a property of the process": lambda: _call("prctl", 4, 1, 0, 0, 0),
        "control a device": lambda: _call("ioctl", 2, 0x5412, memory),
        "make memory that is shared": lambda: os.memfd_create("x"),
        "make a queue of calls": lambda: _call("syscall", _IO_URING_SETUP, 8, 0),
        "get memory that can be executed": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
        "clone3": lambda: _call("syscall", _CLONE3, 0, 0),
        "start a thread": _start_thread,
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = ""
        except OSError as error:
            found[name] = errno.errorcode.get(error.errno or 0, str(error))
    return found


def _start_thread() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join(10)


_ATTACKS: dict[str, Callable[[np.ndarray, str], Any]] = {
    "overwrite": _overwrite,
    "crash": _crash,
    "calls": _try_calls,
    "frame instead of a result": lambda out, argument: _send_and_wait(argument),
}


if __name__ == "__main__":
    recipes.KERNELS = {**recipes.KERNELS, "rgb": Hostile}
    main(WorkerSettings.from_json(sys.argv[1]))
