"""Checkpoints of a training world with megatron's dist_checkpointing: loadable in another parallel layout.

Weights, optimizer state, and the number of updates. Synchronous. Leaves out naming, committing and pruning of
checkpoints, and everything that is not the engine's (data position, metrics).
"""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from models.megatron import (
    AsyncRequest,
    MegatronModule,
    MegatronOptimizer,
    TorchDistSaveShardedStrategy,
    dist_checkpointing,
    filesystem_async,
    parallel_state,
)
from yatt_mm.training.optimizer import make_state


def save_checkpoint(
    directory: Path, model: torch.nn.ModuleList, optimizer: MegatronOptimizer, num_updates: int
) -> None:
    """Write the training state into `directory` (made if missing). Every rank calls it, with the same path."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if num_updates == 0:
        make_state(optimizer)
    state = _sharded_state(model, optimizer, is_loading=False) | {"num_updates": num_updates}
    try:
        dist_checkpointing.save(state, str(directory), _InProcessSave("torch_dist", 1, thread_count=1))
    except CheckpointException as error:  # a BaseException, and only rank 0 has the reason
        raise OSError(f"the checkpoint in {directory} could not be written: {error}") from error


def load_checkpoint(directory: Path, model: torch.nn.ModuleList, optimizer: MegatronOptimizer) -> int:
    """Continue from a checkpoint of any layout; returns its number of updates. Every rank calls it."""
    if not (directory / "metadata.json").is_file():
        raise FileNotFoundError(
            f"no finished checkpoint in {directory} (its last file, metadata.json, is missing); "
            "resume from another checkpoint"
        )
    wanted = _sharded_state(model, optimizer, is_loading=True) | {"num_updates": 0}
    found: dict[str, Any] = dist_checkpointing.load(wanted, str(directory))
    for number, chunk in enumerate(model):
        chunk.load_state_dict(found["model"][str(number)])
    with torch.no_grad():
        optimizer.load_state_dict(found["optimizer"])
    return int(found["num_updates"])


def _sharded_state(model: torch.nn.ModuleList, optimizer: MegatronOptimizer, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    chunks: list[MegatronModule] = list(model)  # type: ignore[arg-type]
    weights = {str(number): chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)}
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata),
    }


class _InProcessSave(TorchDistSaveShardedStrategy):
    """Writes in the calling process.

    megatron's own forks writers and starts a manager process for their results: a second or more of start-up,
    and forking is unsafe in a process with as many threads as a Ray actor has.
    """

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        # megatron makes its results queue once per process; ours stays inside it
        filesystem_async._results_queue = queue.SimpleQueue()
        request = super().async_save(sharded_state_dict, checkpoint_dir)
        if request.async_fn is None:
            return request
        transforms = request.async_fn.args[0]
        return request._replace(async_fn=partial(_write_buckets, transforms))


def _write_buckets(
    transforms: list[Any], rank: int, write_buckets: list[Any], results_queue: queue.SimpleQueue[Any]
) -> None:
    """Write each bucket's file; put all results, or the first error, on the queue, as megatron's finalizer expects."""
    results: dict[int, Any] = {}
    for number, bucket in enumerate(write_buckets):
        written: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, written, pending, True)
        _, outcome = written.get_nowait()
        if isinstance(outcome, Exception):
            results_queue.put(outcome)
            return
        results[number] = outcome
    results_queue.put(results)
