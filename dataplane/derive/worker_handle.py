"""The node's end of one worker process: a job goes out and a result comes back, in JSON over a socket pair.

The encoded bytes follow the job, or the open file that has them. For each job the worker sends `read` when it has the
bytes, then `need` (the number of bytes of the result; it waits for room), then `done`; or it sends `bad` or `failed`.
The result is in memory of the worker's own, and the node copies it into the arena. Nothing that a worker sends is
believed without a look: a decoder that was taken over may send anything.
"""

import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.core.child_process import child_environment, wait_for_killed
from dataplane.core.errors import OutOfSpaceError
from dataplane.datasets.formats.range_files import open_local
from dataplane.derive.result_memory import ResultMemory
from dataplane.derive.worker_settings import WorkerSettings
from dataplane.media.limits import MediaLimits
from dataplane.media.videos import VideoDecoder
from dataplane.storage.entries import Slab

Allocate = Callable[[int], Slab]
"""A function that returns a slab for this many bytes. It may wait for room; if there is none, it raises
OutOfSpaceError."""

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
"""The time in seconds that a killed process has to end. One that waits for a disk may not end before the disk
answers."""
READ_TIMEOUT_S = 120.0
MAIN_MODULE = "dataplane.derive.worker_main"
_MAX_FRAME_BYTES = 16 << 20
"""More than the JSON frame of any result takes."""

log = logging.getLogger(__name__)

_CRASHES = (-signal.SIGSEGV, -signal.SIGFPE, -signal.SIGILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One medium, and the recipe that the worker applies to it."""

    label: str
    """The shard and key of the medium, for error messages."""
    path: str | None
    """The local file that has the bytes. None when `data` has them."""
    offset: int
    nbytes: int
    digest: str
    formats: tuple[str, ...]
    recipe: Mapping[str, Any]
    no_links: bool = False
    """True if no part of `path` may be a symbolic link."""
    data: bytes | memoryview | None = None
    """The encoded bytes, if the node has them already. The worker gets them after the job."""

    @property
    def decoder(self) -> VideoDecoder | None:
        """The library that decodes the video. None for an image."""
        found: VideoDecoder | None = self.recipe.get("decoder")
        return found

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
            "is_file": self.data is None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The part of the arena's store that a job needs."""

    allocate: Allocate
    view: Callable[[Slab], np.ndarray]
    """Returns the bytes of a slab, writable."""
    abort: Callable[[Slab], None]
    """Gives back a slab."""


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

    def __init__(
        self, result_bytes: int, limits: MediaLimits, decoder: VideoDecoder | None = None, *, is_filtered: bool
    ) -> None:
        """Start the process. `result_bytes` is the size of the largest result; WorkerSettings explains the others."""
        self._socket, theirs = socket.socketpair()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(READ_TIMEOUT_S), 0))
        self._memory = ResultMemory(result_bytes)
        settings = WorkerSettings(
            socket_fd=theirs.fileno(),
            result_fd=self._memory.fd,
            result_bytes=result_bytes,
            decoder=decoder,
            is_filtered=is_filtered,
            limits=limits,
        )
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MAIN_MODULE, settings.to_json()],
                    pass_fds=[theirs.fileno(), self._memory.fd],
                    stdin=subprocess.DEVNULL,
                    cwd=Path(__file__).resolve().parents[2],
                    env=child_environment(os.environ),
                )
            finally:
                os.close(self._memory.fd)
        self.pid = self._process.pid
        self.decoder = decoder
        """The library of videos that the process has. It has no other."""
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._limits = limits
        self._start_s = START_TIMEOUT_S
        """The additional time in seconds for the first job, because the worker is still starting."""

    def run(self, job: Job, room: Room) -> Result:
        """Run a job and return its result. Raises WorkerDiedError when the process has ended, and the errors of
        `room.allocate`."""
        slab: Slab | None = None
        try:
            frame = self._begin(job)
            if "read" in frame:
                frame = self._decode()
            if "need" in frame:
                try:
                    slab = room.allocate(_count(frame["need"]))
                except OutOfSpaceError:
                    self._send({"has_room": False})
                    self._decode()
                    raise
                # the medium's time begins again, because the wait for room was not its fault
                self._send({"has_room": True})
                frame = self._decode()
            if "done" in frame and slab is not None:
                return _result(frame["done"], slab, self._memory.take(room.view(slab)))
            if slab is not None:
                room.abort(slab)
            return Result(bad=str(frame.get("bad", "")), failed=str(frame.get("failed", "")))
        except _MalformedError as error:
            if slab is not None:
                room.abort(slab)
            self.close()
            raise WorkerDiedError(f"worker {self.pid} sent a frame that no worker sends: {error}") from error
        except WorkerDiedError:
            if slab is not None:
                room.abort(slab)
            self.close()
            raise

    def close(self) -> None:
        """End the process. Calling this twice is safe. Waits for the process, at most `END_TIMEOUT_S`."""
        if self._process.poll() is None:
            self._process.kill()
        self._connection.close()
        self._socket.close()
        wait_for_killed(self._process, "worker", END_TIMEOUT_S)

    def _begin(self, job: Job) -> dict[str, Any]:
        """Send a job with its source, and return the first frame of the reply."""
        if job.data is not None:
            self._send(job.to_dict())
            self._send_bytes(job.data)
            return self._read_source()
        assert job.path is not None
        try:
            fd = open_local(job.path, no_links=job.no_links)
        except OSError as error:
            return {"failed": f"cannot read {job.path}: {error}"}
        try:
            self._send(job.to_dict())
            socket.send_fds(self._socket, [b"f"], [fd])
        except OSError as error:
            raise self._death() from error
        finally:
            os.close(fd)
        return self._read_source()

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

    def _send_bytes(self, data: bytes | memoryview) -> None:
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
            frame = json.loads(self._connection.recv_bytes(_MAX_FRAME_BYTES))
        except (EOFError, OSError) as error:
            raise self._death() from error
        except (ValueError, RecursionError) as error:
            raise _MalformedError(f"no JSON ({error})") from error
        if not isinstance(frame, dict):
            raise _MalformedError(f"{type(frame).__name__} instead of an object")
        return frame

    def _death(self) -> WorkerDiedError:
        try:
            code = self._process.wait(timeout=5)
            return WorkerDiedError(f"worker {self._process.pid} ended with code {code}", code)
        except subprocess.TimeoutExpired:
            return WorkerDiedError(f"worker {self._process.pid} closed its socket")


class _MalformedError(Exception):
    """The worker sent what no worker of this version sends."""


def _result(done: Any, slab: Slab, checksum: str) -> Result:
    try:
        shape, meta = tuple(map(_count, done["shape"])), dict(done["meta"])
        if math.prod(shape) != slab.nbytes:
            raise _MalformedError(f"the shape {shape} for {slab.nbytes} bytes")
        return Result(
            slab=slab,
            shape=shape,
            meta=meta,
            checksum=checksum,
            pixel_bytes=_count(done["pixel_bytes"]),
            format=str(done["format"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _MalformedError(f"{type(error).__name__}: {error}") from error


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _MalformedError(f"{repr(value)[:60]} instead of a number of bytes or a size")
    return value
