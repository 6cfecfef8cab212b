"""The node's pool of worker processes. Media are decoded there, never in the threads that serve Flight.

Each worker process belongs to one thread of the node. A worker that dies is replaced. A medium that kills a worker
twice, or that takes longer than the limit, is bad media and not a failure of the node.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dataplane.core.errors import NodeTimeoutError
from dataplane.core.seccomp import why_unavailable
from dataplane.derive.priority_queue import PriorityQueue
from dataplane.derive.worker_handle import (
    Allocate,
    Job,
    Result,
    Room,
    WorkerDiedError,
    WorkerHandle,
    WorkerOverdueError,
)
from dataplane.media.limits import DEFAULT_LIMITS, MediaLimits
from dataplane.media.videos import VideoDecoder
from dataplane.storage.store import Store

MAX_ATTEMPTS = 2

log = logging.getLogger(__name__)


class DecodePool:
    """A pool of `num_workers` worker processes, whose results go into `store`. `submit` returns a future."""

    def __init__(self, num_workers: int, store: Store, limits: MediaLimits = DEFAULT_LIMITS) -> None:
        self.num_workers = num_workers
        self.why_unfiltered = why_unavailable()
        """The reason why the workers keep all calls of the system, or an empty string if they give up most."""
        if self.why_unfiltered:
            log.warning(
                "decode workers run without a filter of system calls: %s; a hostile medium that takes a decoder over "
                "may do what this user may do",
                self.why_unfiltered,
            )
        self._store = store
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
        room = Room(allocate=allocate, view=self._store.view, abort=self._store.abort)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return self._worker(job.decoder).run(job, room)
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

    def _worker(self, decoder: VideoDecoder | None) -> WorkerHandle:
        """Return this thread's worker. One that lacks the decoder is replaced, because no worker may import any more;
        and two decoders in one process would share libraries of the same name."""
        worker: WorkerHandle | None = self._local.__dict__.get("worker")
        if worker is not None and decoder not in (None, worker.decoder):
            self._discard_worker()
            worker = None
        if worker is None:
            is_filtered = not self.why_unfiltered
            worker = WorkerHandle(self._store.segment.capacity, self._limits, decoder, is_filtered=is_filtered)
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
