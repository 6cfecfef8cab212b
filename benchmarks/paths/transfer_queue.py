"""TransferQueue from PyPI with its default storage, through its key-value calls, on the Ray of `ray_store`.

`transferqueue/get` ends with a private copy as one tensor (a nested one if sizes differ), fetched over ZMQ from two
storage units. `transferqueue/put` puts the same objects from this process; building the TensorDict is not timed.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from benchmarks.paths.measuring import Case, Measured, measure

_numbers = itertools.count()


@ray.remote(num_cpus=1)
class QueuePutter:
    """An actor that puts objects from another process."""

    def __init__(self) -> None:
        transfer_queue.init()

    def put(self, case: Case, partition: str) -> None:
        """Put the objects of a case."""
        transfer_queue.kv_batch_put(keys=_keys(case), partition_id=partition, fields=_fields(case))


@contextmanager
def local_queue() -> Iterator[Any]:
    """Run TransferQueue on the running Ray during a `with` block. Yield the handle of a `QueuePutter`, an actor that
    puts objects into it."""
    logging.getLogger("transfer_queue").setLevel(logging.ERROR)
    transfer_queue.init()
    try:
        yield QueuePutter.remote()
    finally:
        transfer_queue.close()


def rows(putter: Any, case: Case, *, quick: bool) -> Iterator[Measured]:
    """Measure getting what an actor put, then putting."""
    keys = _keys(case)
    partition = f"bench-{next(_numbers)}"
    ray.get(putter.put.remote(case, partition))
    yield measure("transferqueue/get", case, lambda _: _get(keys, partition), quick=quick)
    if case.count > 1:
        yield measure("transferqueue/get", case.first(), lambda _: _get(keys[:1], partition), quick=quick)
    transfer_queue.kv_clear(keys=keys, partition_id=partition)
    fields = _fields(case)
    yield measure(
        "transferqueue/put",
        case,
        lambda name: transfer_queue.kv_batch_put(keys=keys, partition_id=name, fields=fields),
        prepare=lambda: f"bench-{next(_numbers)}",
        clean=lambda name: transfer_queue.kv_clear(keys=keys, partition_id=name),
        quick=quick,
    )


def _get(keys: list[str], partition: str) -> torch.Tensor:
    return transfer_queue.kv_batch_get(keys=keys, partition_id=partition, select_fields="data")["data"]


def _keys(case: Case) -> list[str]:
    return [f"object-{at}" for at in range(case.count)]


def _fields(case: Case) -> TensorDict:
    tensors = [torch.from_numpy(payload) for payload in case.payloads()]
    data = torch.stack(tensors) if case.is_uniform else torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    return TensorDict({"data": data}, batch_size=case.count)
