"""Real training ranks for tests: processes that are started once and run one job after another.

Starting a rank costs seconds (torch, transformers, megatron), so all tests of a session share the pool; every job
has a process group of its own over the first `world_size` ranks.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0


class RankPool:
    """Up to eight ranks, started when first needed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """`job(rank, *args)` on every rank of a new world; their results in the order of ranks."""
        while len(self._ranks) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(len(self._ranks), theirs), daemon=True)
            process.start()
            self._ranks.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            pipes = [pipe for _, pipe in self._ranks[:world_size]]
            for pipe in pipes:
                pipe.send((world_size, f"file://{Path(folder) / 'store'}", job, args))
            outcomes = [_receive(pipe, rank) for rank, pipe in enumerate(pipes)]
        failed = [outcome for is_good, outcome in outcomes if not is_good]
        assert not failed, "\n".join(failed)
        return [outcome for _, outcome in outcomes]

    def close(self) -> None:
        """End the processes."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(10)
            if process.is_alive():
                process.terminate()


def _receive(pipe: Connection, rank: int) -> tuple[bool, Any]:
    assert pipe.poll(DEADLINE_S), f"rank {rank} did not answer within {DEADLINE_S} s"
    return pipe.recv()


def _serve(rank: int, pipe: Connection) -> None:
    import torch.distributed as dist

    from yatt_mm.training.distributed import init_distributed

    while True:
        try:
            world_size, store, job, args = pipe.recv()
        except EOFError:
            return
        try:
            init_distributed(rank=rank, world_size=world_size, store_address=store, timeout_s=60)
            pipe.send((True, job(rank, *args)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
