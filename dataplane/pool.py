"""The node's pool of worker processes: media are decoded there, never in the threads that serve Flight.

One thread of the node owns one worker process and speaks with it in JSON frames over a socket pair. A worker that dies
or hangs is replaced; the medium that did it twice is bad media, not an outage.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dataplane.errors import NodeTimeoutError, OutOfSpaceError
from dataplane.store import Slab

JOB_TIMEOUT_S = 120.0
START_TIMEOUT_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One medium and what to make of it."""

    label: str
    """How people find the medium: shard and key."""
    path: str | None
    """A local file; None when the bytes lie in the arena."""
    offset: int
    nbytes: int
    digest: str
    formats: tuple[str, ...]
    recipe: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a worker made, still unsealed in `slab`; or why there is nothing."""

    slab: Slab | None = None
    shape: tuple[int, ...] = ()
    meta: Mapping[str, Any] | None = None
    checksum: str = ""
    pixel_bytes: int = 0
    format: str = ""
    """What the source is, by Pillow's name."""
    bad: str = ""
    """The medium is at fault."""
    failed: str = ""
    """The bytes could not be had; another try may go well."""


class WorkerDiedError(Exception):
    """A worker ended or hung in the middle of a job."""


class Pool:
    """`num_workers` processes; `submit` returns a future."""

    def __init__(
        self,
        num_workers: int,
        segment: Path,
        allocate: Callable[[int, float], Slab],
        abort: Callable[[Slab], None],
    ) -> None:
        self.num_workers = num_workers
        self._segment = segment
        self._allocate = allocate
        self._abort = abort
        self._local = threading.local()
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="pool")

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Run `task(*args)` in a pool thread, from where it may call `run`."""
        return self._threads.submit(task, *args)

    def run(self, job: Job, deadline: float) -> Result:
        """Run a job in this thread's worker; it waits for room until `deadline`. Call it from a pool thread only."""

        def allocate(nbytes: int) -> Slab:
            return self._allocate(nbytes, deadline)

        for attempt in (1, 2):
            try:
                return self._worker().run(job, allocate, self._abort)
            except WorkerDiedError as error:
                log.warning("pool worker lost on %s (attempt %d): %s", job.label, attempt, error)
                reason = str(error)
                self._discard_worker()
        return Result(bad=f"killed the decoder twice: {reason}")

    def close(self) -> None:
        """End the workers; jobs in flight are lost."""
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _worker(self) -> "_Worker":
        worker: _Worker | None = self._local.__dict__.get("worker")
        if worker is None:
            worker = _Worker(self._segment)
            with self._lock:
                if self._is_closed:
                    worker.close()
                    raise NodeTimeoutError("the node is stopping; ask another one")
                self._workers.append(worker)
            self._local.worker = worker
        return worker

    def _discard_worker(self) -> None:
        worker: _Worker = self._local.worker
        del self._local.worker
        worker.close()
        with self._lock:
            self._workers.remove(worker)


class _Worker:
    """One child process and the node's end of its socket."""

    def __init__(self, segment: Path) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "dataplane.pool_worker", str(segment), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).resolve().parent.parent,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self._connection = Connection(ours.detach())
        self._is_started = False

    def run(self, job: Job, allocate: Callable[[int], Slab], abort: Callable[[Slab], None]) -> Result:
        deadline = time.monotonic() + JOB_TIMEOUT_S + (0 if self._is_started else START_TIMEOUT_S)
        slab: Slab | None = None
        try:
            self._send(job_frame(job))
            frame = self._receive(deadline)
            self._is_started = True
            if "need" in frame:
                try:
                    slab = allocate(frame["need"])
                except OutOfSpaceError:
                    self._send({"offset": None})
                    self._receive(time.monotonic() + JOB_TIMEOUT_S)
                    raise
                deadline = time.monotonic() + JOB_TIMEOUT_S  # waiting for room is not the medium's fault
                self._send({"offset": slab.offset})
                frame = self._receive(deadline)
        except WorkerDiedError:
            self.close()  # it must be gone before its slab can be anyone else's
            if slab is not None:
                abort(slab)
            raise
        if "done" in frame:
            done = frame["done"]
            return Result(
                slab=slab,
                shape=tuple(done["shape"]),
                meta=done["meta"],
                checksum=done["checksum"],
                pixel_bytes=done["pixel_bytes"],
                format=done["format"],
            )
        return Result(bad=frame.get("bad", ""), failed=frame.get("failed", ""))

    def close(self) -> None:
        """End the process; safe to call twice."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._connection.close()

    def _send(self, frame: Mapping[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(frame).encode())
        except OSError as error:
            raise WorkerDiedError(self._describe()) from error

    def _receive(self, deadline: float) -> dict[str, Any]:
        try:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise WorkerDiedError(f"no answer in {JOB_TIMEOUT_S:.0f} s")
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise WorkerDiedError(self._describe()) from error

    def _describe(self) -> str:
        try:
            return f"worker {self._process.pid} ended with code {self._process.wait(timeout=5)}"
        except subprocess.TimeoutExpired:
            return f"worker {self._process.pid} closed its socket"


def job_frame(job: Job) -> dict[str, Any]:
    """A job as the worker reads it."""
    return {
        "label": job.label,
        "path": job.path,
        "offset": job.offset,
        "nbytes": job.nbytes,
        "digest": job.digest,
        "formats": list(job.formats),
        "recipe": dict(job.recipe),
    }
