"""Real training ranks for tests: processes that are started once and run one job after another.

Importing what a rank needs takes seconds (torch, transformers, megatron). It is done once, in a server without threads
from which ranks are forked. All tests of a pytest session share these processes; every job has a process group of its
own over the first `world_size` ranks.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEADLINE_S = 300.0
"""The deadline of a job in seconds, including the start of its ranks: eight at once take minutes on a busy machine."""
PRELOADED = ["tests.yatt_mm.training.preloaded"]
MAX_THREADS = 150
"""The maximum number of threads of one rank. Process groups of some jobs are never collected, and each wakes its
threads a hundred times a second. A rank with more threads is started again."""
GRACE_S = 5.0
"""The time in seconds that the other ranks may take to fail too, after one has failed."""


class RankPool:
    """Up to eight ranks. They are started when they are first needed, and again after a job that failed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `job(rank, *args)` on every rank of a new world. Return the results in the order of ranks.

        Raises AssertionError with the errors of the ranks, soon after the first of them failed.
        """
        if any(len(list(Path(f"/proc/{process.pid}/task").iterdir())) > MAX_THREADS for process, _ in self._ranks):
            self.close()
        while len(self._ranks) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(len(self._ranks), theirs), daemon=True)
            process.start()
            theirs.close()  # or a rank that dies would not close the pipe
            self._ranks.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            pipes = [pipe for _, pipe in self._ranks[:world_size]]
            for pipe in pipes:
                pipe.send((world_size, f"file://{Path(folder) / 'store'}", job, args))
            outcomes = _collect(pipes)
            failures = [outcome for is_good, outcome in outcomes.values() if not is_good]
            if silent := sorted(set(range(world_size)) - outcomes.keys()):
                failures.append(f"no answer from ranks {silent}")
            if failures or any(not process.is_alive() for process, _ in self._ranks):
                # Before the folder goes, as a rank may still write there. A rank whose group failed to start has
                # counted it all the same: it would not find the others in the next one.
                self.close()
        assert not failures, "\n".join(failures)
        return [outcomes[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """End the processes, also stuck ones; `run` starts new ones."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks.clear()


def _collect(pipes: list[Connection]) -> dict[int, tuple[bool, Any]]:
    """Return, by rank, (whether its job returned, its result or its error), of the ranks that reply in time."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    end = time.monotonic() + DEADLINE_S
    while waiting:
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                outcomes[rank] = (False, f"rank {rank} died")
            if not outcomes[rank][0]:
                end = min(end, time.monotonic() + GRACE_S)
    return outcomes


def _serve(rank: int, pipe: Connection) -> None:
    import torch.distributed as dist

    from models.compat.megatron_core import parallel_state
    from yatt_mm.training.distributed import init_distributed

    gc.freeze()  # what is there now stays: to look through it after every job takes longer than most jobs
    while True:
        try:
            world_size, store, job, args = pipe.recv()
        except EOFError:
            return
        try:
            init_distributed(rank=rank, world_size=world_size, store=store, timeout_s=DEADLINE_S)
            pipe.send((True, job(rank, *args)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        finally:
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()  # else the threads of the job's groups go on, a hundred wake-ups a second each
