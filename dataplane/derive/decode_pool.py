"""The node's pool of worker processes. Media are decoded there, never in the threads that serve Flight.

Each worker process belongs to one thread of the node. A worker that dies is replaced. A medium that kills a worker
twice, or that takes longer than the limit, is bad media and not a failure of the node.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dataplane.core.errors import NodeTimeoutError
from dataplane.derive.priority_queue import PriorityQueue
from dataplane.derive.worker_handle import Job, Result, WorkerDiedError, WorkerHandle, WorkerOverdueError
from dataplane.media.limits import DEFAULT_LIMITS, MediaLimits
from dataplane.storage.entries import Slab

Allocate = Callable[[int], Slab]
"""A function that returns a slab for this many bytes. It may wait for room; if there is none, it raises
OutOfSpaceError."""
MAX_ATTEMPTS = 2

log = logging.getLogger(__name__)


class DecodePool:
    """A pool of `num_workers` worker processes. `submit` returns a future."""

    def __init__(
        self,
        num_workers: int,
        segment: Path,
        abort: Callable[[Slab], None],
        limits: MediaLimits = DEFAULT_LIMITS,
    ) -> None:
        self.num_workers = num_workers
        self._segment = segment
        self._abort = abort
        self._limits = limits
        self._local = threading.local()
        self._workers: list[WorkerHandle] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._queue = PriorityQueue(num_workers)

    @property
    def queue(self) -> PriorityQueue:
        """The queue of tasks for the pool's threads."""
        return self._queue

    def submit(self, task: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Run `task(*args)` in a pool thread, and return the future of its result. The task may call `run`."""
        return self._queue.submit(lambda: task(*args))

    def run(self, job: Job, allocate: Allocate) -> Result:
        """Run a job in this thread's worker and return its result. Call it from a pool thread only. Waits for: the
        worker, `allocate`."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return self._worker().run(job, allocate, self._abort)
            except WorkerOverdueError as error:
                self._discard_worker()
                return error.result
            except WorkerDiedError as error:
                log.warning("pool worker lost on %s (attempt %d): %s", job.label, attempt, error)
                died = error
                self._discard_worker()
        return Result(bad=f"killed the decoder twice: {died}", is_lasting=died.is_crash)

    def close(self) -> None:
        """End the workers. Jobs that run now are lost."""
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
        self._queue.close()
        for worker in workers:
            worker.close()

    def pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        with self._lock:
            return [worker.pid for worker in self._workers]

    def _worker(self) -> WorkerHandle:
        worker: WorkerHandle | None = self._local.__dict__.get("worker")
        if worker is None:
            worker = WorkerHandle(self._segment, self._limits)
            with self._lock:
                if self._is_closed:
                    worker.close()
                    raise NodeTimeoutError("the node is stopping; ask another one")
                self._workers.append(worker)
            self._local.worker = worker
        return worker

    def _discard_worker(self) -> None:
        worker: WorkerHandle = self._local.worker
        del self._local.worker
        worker.close()
        with self._lock:
            self._workers.remove(worker)
