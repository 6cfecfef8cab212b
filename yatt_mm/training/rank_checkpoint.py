"""Checkpoints of a training world with megatron's dist_checkpointing, which load in another parallel layout too.

They hold weights, optimizer state, and the number of updates. A save copies the state to host memory and writes it in a
thread while training continues; `PendingSave.finish` makes it complete. `yatt_mm.common.checkpoints` names, commits and
prunes checkpoints. State outside of the engine (the order of prompts, metrics) is not stored here.

A checkpoint stores only the optimizer's tensors, under their parameters' names. The other optimizer state (settings,
the number of optimizers that megatron chains, the order of their groups) depends on the layout, so the run that loads
makes its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from models.compat.megatron_core import (
    AsyncRequest,
    MegatronModule,
    MegatronOptimizer,
    ShardedBase,
    TorchDistSaveShardedStrategy,
    dist_checkpointing,
    extract_matching_values,
    filesystem_async,
    merge,
    parallel_state,
)
from yatt_mm.common.errors import DiskError
from yatt_mm.common.manifest import FileRecord, record_file
from yatt_mm.common.writing import writing
from yatt_mm.training.optimizer import make_state


class PendingSave:
    """A checkpoint whose state was copied. Training may continue while a thread writes this rank's part.

    `load_checkpoint` finds the checkpoint only after `finish` has returned on every rank.
    """

    def __init__(self, directory: Path, request: AsyncRequest) -> None:
        self._directory = directory
        self._finalize: list[Callable[[], None]] = request.finalize_fns
        self._recorded: dict[str, FileRecord] = {}
        self._thread: threading.Thread | None = None
        if request.async_fn is None:  # this rank has nothing to write that another rank does not write
            return
        rank, write_buckets, results = request.async_fn_args
        arguments = (rank, _host_copies(write_buckets), results, self._recorded)
        self._thread = threading.Thread(target=request.async_fn, args=arguments, name=f"save {directory}", daemon=True)
        self._thread.start()

    def finish(self) -> dict[str, FileRecord]:
        """Wait for the thread, then complete the checkpoint. Return by name the files that this rank wrote, which are
        on the disk. Collective.

        Raises:
            DiskError: a rank could not write its part; rank 0's message says which and why.
        """
        if self._thread is not None:
            self._thread.join()
        with _named_failure(self._directory):
            for finalize in self._finalize:
                finalize()
        return self._recorded


def start_save(
    directory: Path, model: torch.nn.ModuleList, optimizer: MegatronOptimizer, num_updates: int
) -> PendingSave:
    """Begin to write the training state into `directory` (made if missing). Every rank calls it, with the same path.

    The checkpoint holds the present weights, whatever happens to them afterwards.
    """
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if num_updates == 0:
        make_state(optimizer)
    state = _sharded_state(model, optimizer, is_loading=False)
    tensors, _ = _split(state["optimizer"])
    whole = {"model": state["model"], "optimizer": tensors, "num_updates": num_updates}
    with _named_failure(directory):
        strategy = _ThreadSave("torch_dist", 1, thread_count=1)
        request = dist_checkpointing.save(whole, str(directory), strategy, async_sharded_save=True)
    return PendingSave(directory, request)


def load_checkpoint(directory: Path, model: torch.nn.ModuleList, optimizer: MegatronOptimizer) -> int:
    """Continue from a checkpoint of any layout; return its number of updates. Every rank calls it."""
    if not (directory / "metadata.json").is_file():
        raise FileNotFoundError(
            f"no finished checkpoint in {directory} (its last file, metadata.json, is missing); "
            "resume from another checkpoint"
        )
    state = _sharded_state(model, optimizer, is_loading=True)
    tensors, rest = _split(state["optimizer"])
    wanted = {"model": state["model"], "optimizer": tensors, "num_updates": 0}
    found: dict[str, Any] = dist_checkpointing.load(wanted, str(directory))
    for number, chunk in enumerate(model):
        chunk.load_state_dict(found["model"][str(number)])
    with torch.no_grad():
        optimizer.load_state_dict(merge(rest, found["optimizer"]))
    num_updates = int(found["num_updates"])
    for chained in optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            group["step"] = num_updates
    return num_updates


def _split(optimizer_state: Any) -> tuple[Any, Any]:
    """Return (the entries with their own names in the checkpoint, the entries that depend on the layout), nested as
    before."""
    tensors, rest = extract_matching_values(optimizer_state, lambda value: isinstance(value, ShardedBase))
    return tensors, rest


@contextmanager
def _named_failure(directory: Path) -> Iterator[None]:
    try:
        with writing(directory):
            yield
    except CheckpointException as error:  # it is a BaseException, and only rank 0 has the reason
        if not error.failures:
            raise DiskError(f"cannot write {directory}: another rank failed; training rank 0 says why") from error
        rank, (reason, _) = next(iter(error.failures.items()))
        raise DiskError(f"cannot write {directory}: rank {rank}: {reason}") from error


def _host_copies(write_buckets: list[Any]) -> list[Any]:
    return [
        (file, key, (data, [(item, tensor.detach().to("cpu", copy=True)) for item, tensor in tensors]))
        for file, key, (data, tensors) in write_buckets
    ]


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


class _ThreadSave(TorchDistSaveShardedStrategy):
    """Writes in a thread of the calling process.

    megatron's own class forks writers and starts a manager process for their results. That takes a second or more, and
    forking is unsafe in a process with as many threads as a Ray actor has.
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
    transforms: list[Any],
    rank: int,
    write_buckets: list[Any],
    results_queue: queue.SimpleQueue[Any],
    recorded: dict[str, FileRecord],
) -> None:
    """Write each bucket's file, and record it. Put all results, or the first error, on the queue, as megatron's
    finalizer expects."""
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
        path = Path(bucket[0])
        try:
            recorded[path.name] = record_file(path)
        except OSError as error:
            results_queue.put(error)
            return
    results_queue.put(results)
