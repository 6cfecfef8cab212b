"""The node's end of one worker process: a job goes out and a result comes back, in JSON over a socket pair.

The encoded bytes follow the job if the node has read them. For each job the worker sends `read` when it has the bytes,
then `need` (the number of bytes of the result; it waits for the slab), then `done`; or it sends `bad` or `failed`.
"""

import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dataplane.core.errors import OutOfSpaceError
from dataplane.media.limits import MediaLimits
from dataplane.storage.entries import Slab

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
"""The time in seconds that a killed process has to end. One that waits for a disk may not end before the disk
answers."""
READ_TIMEOUT_S = 120.0

log = logging.getLogger(__name__)

_CRASHES = (-signal.SIGSEGV, -signal.SIGFPE, -signal.SIGILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One medium, and the recipe that the worker applies to it."""

    label: str
    """The shard and key of the medium, for error messages."""
    path: str | None
    """A local file. None when the bytes are in the arena."""
    offset: int
    nbytes: int
    digest: str
    formats: tuple[str, ...]
    recipe: Mapping[str, Any]
    no_links: bool = False
    """True if no part of `path` may be a symbolic link."""
    data: bytes | None = None
    """The encoded bytes, if the node has read them already. The worker gets them after the job."""

    def to_dict(self) -> dict[str, Any]:
        """Return the job in the form that the worker reads."""
        return {
            "label": self.label,
            "path": self.path,
            "offset": self.offset,
            "nbytes": self.nbytes,
            "digest": self.digest,
            "formats": list(self.formats),
            "recipe": dict(self.recipe),
            "no_links": self.no_links,
            "has_data": self.data is not None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a worker: the bytes are in `slab`, which is not published yet. Without a slab, `bad` or `failed`
    gives the reason."""

    slab: Slab | None = None
    shape: tuple[int, ...] = ()
    meta: Mapping[str, Any] | None = None
    checksum: str = ""
    pixel_bytes: int = 0
    format: str = ""
    """The format of the source: Pillow's name, or that of its container."""
    bad: str = ""
    """The fault of the medium, or an empty string."""
    is_lasting: bool = True
    """True if every try ends with the same fault; False if the machine's memory or load may be the cause."""
    failed: str = ""
    """The reason why the bytes could not be read, or an empty string. Another try may succeed."""


class WorkerDiedError(Exception):
    """A worker ended during a job."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.is_crash = code in _CRASHES
        """True if the decoder itself crashed. If the process ended in another way, the machine may be the cause."""


class WorkerOverdueError(WorkerDiedError):
    """A worker took longer than its time limit. `result` says whether the medium is at fault."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.bad or result.failed)
        self.result = result


class WorkerHandle:
    """One child process and the node's end of its socket. Not thread-safe, except `close`."""

    def __init__(self, segment: Path, limits: MediaLimits) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(READ_TIMEOUT_S), 0))
        command = [sys.executable, "-m", "dataplane.derive.worker_main", str(segment), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, json.dumps(limits.to_dict())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).resolve().parents[2],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.pid = self._process.pid
        self._connection = Connection(ours.detach())
        self._limits = limits
        self._start_s = START_TIMEOUT_S
        """The additional time in seconds for the first job, because the worker is still starting."""

    def run(self, job: Job, allocate: Callable[[int], Slab], abort: Callable[[Slab], None]) -> Result:
        """Run a job and return its result. Raises WorkerDiedError when the process has ended, and the errors of
        `allocate`."""
        slab: Slab | None = None
        try:
            self._send(job.to_dict())
            if job.data is not None:
                self._send_bytes(job.data)
            frame = self._read_source()
            if "read" in frame:
                frame = self._decode()
            if "need" in frame:
                try:
                    slab = allocate(frame["need"])
                except OutOfSpaceError:
                    self._send({"offset": None})
                    self._decode()
                    raise
                # the medium's time begins again, because the wait for room was not its fault
                self._send({"offset": slab.offset})
                frame = self._decode()
        except WorkerDiedError:
            # the process must be gone before another object gets its slab
            self._end(partial(abort, slab) if slab is not None else None)
            raise
        if "done" in frame:
            return _result(frame["done"], slab)
        if slab is not None:
            abort(slab)
        return Result(bad=frame.get("bad", ""), failed=frame.get("failed", ""))

    def close(self) -> None:
        """End the process. Calling this twice is safe. Waits for the process, at most `END_TIMEOUT_S`."""
        self._end(None)

    def _end(self, when_gone: Callable[[], None] | None) -> None:
        """End the process and call `when_gone` when it is gone: before this returns, unless the system keeps it."""
        if self._process.poll() is None:
            self._process.kill()
        self._connection.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.error(
                "worker %d was killed and has not ended in %g s (it may wait for a disk or a network file system); it "
                "is left to the system%s",
                self.pid,
                END_TIMEOUT_S,
                ", and its room in the arena is taken until it ends" if when_gone else "",
            )
            threading.Thread(target=self._wait_for_end, args=(when_gone,), name="killed-worker", daemon=True).start()
            return
        if when_gone is not None:
            when_gone()

    def _wait_for_end(self, when_gone: Callable[[], None] | None) -> None:
        self._process.wait()
        log.warning("worker %d, which had been killed, has ended", self.pid)
        if when_gone is not None:
            when_gone()

    def _read_source(self) -> dict[str, Any]:
        allowed_s = READ_TIMEOUT_S + self._start_s
        frame = self._receive(allowed_s)
        self._start_s = 0.0
        if frame is None:
            raise WorkerOverdueError(Result(failed=f"its bytes could not be read in {allowed_s:.0f} s"))
        return frame

    def _decode(self) -> dict[str, Any]:
        allowed_s = self._limits.max_decode_seconds
        frame = self._receive(allowed_s)
        if frame is None:
            reason = f"not decoded in {allowed_s:g} s, which is the limit of this node"
            raise WorkerOverdueError(Result(bad=reason, is_lasting=False))
        return frame

    def _send(self, frame: Mapping[str, Any]) -> None:
        self._send_bytes(json.dumps(frame).encode())

    def _send_bytes(self, data: bytes) -> None:
        """Send bytes. A worker that takes none for `READ_TIMEOUT_S` counts as dead."""
        try:
            self._connection.send_bytes(data)
        except OSError as error:
            raise self._death() from error

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next frame, or None if none comes in time."""
        try:
            if not self._connection.poll(timeout_s):
                return None
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _death(self) -> WorkerDiedError:
        try:
            code = self._process.wait(timeout=5)
            return WorkerDiedError(f"worker {self._process.pid} ended with code {code}", code)
        except subprocess.TimeoutExpired:
            return WorkerDiedError(f"worker {self._process.pid} closed its socket")


def _result(done: Mapping[str, Any], slab: Slab | None) -> Result:
    return Result(
        slab=slab,
        shape=tuple(done["shape"]),
        meta=done["meta"],
        checksum=done["checksum"],
        pixel_bytes=done["pixel_bytes"],
        format=done["format"],
    )
