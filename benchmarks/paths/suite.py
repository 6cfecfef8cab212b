"""The whole comparison: its cases and their order. A system that is not installed is left out."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
from rich.console import Console

from benchmarks.paths import local, ours, plain_flight
from benchmarks.paths.measuring import Case, Measured, helper
from dataplane.core.process import keep_freed_memory

KIB, MIB = 1 << 10, 1 << 20
NODE_BYTES = 1 << 30
QUICK_NODE_BYTES = 64 << 20
PATCH_VALUES = 1176
"""The number of bytes of one patch of a Qwen-VL: 14 x 14 pixels, 3 colours, 2 frames."""


def cases(*, quick: bool) -> list[Case]:
    """Return the cases: three sizes in batches, one large object, and a batch like that of a training step."""
    if quick:
        sizes, num_patches = ((64 * KIB, 64), (MIB, 4)), 16
    else:
        sizes, num_patches = ((64 * KIB, 256), (MIB, 64), (64 * MIB, 1)), 512
    same = [
        Case(label=_label(nbytes), shapes=((nbytes,),) * count, seed=seed) for seed, (nbytes, count) in enumerate(sizes)
    ]
    rng = np.random.default_rng(99)
    num_rows = np.exp(rng.uniform(math.log(64), math.log(1280), num_patches)).astype(int) // 4 * 4
    mixed = Case(label="batch", shapes=tuple((rows, PATCH_VALUES) for rows in num_rows.tolist()), seed=99)
    return [*same, mixed]


def run(*, quick: bool, console: Console) -> Iterator[Measured]:
    """Yield every row, all paths of one case before the next case. Starts the processes that it needs and stops exactly
    those."""
    keep_freed_memory()
    with ExitStack() as stack:
        nodes = stack.enter_context(ours.nodes(QUICK_NODE_BYTES if quick else NODE_BYTES))
        flight = stack.enter_context(helper(plain_flight.serve))
        sender = stack.enter_context(helper(local.send_arrays))
        peers = [] if quick else _ray_peers(stack, console)
        for case in cases(quick=quick):
            yield from local.limits(case, quick=quick)
            yield from ours.rows(nodes, case, quick=quick)
            yield from plain_flight.streamed(flight, case, quick=quick)
            for module, putter in peers:
                yield from module.rows(putter, case, quick=quick)
            yield from local.pickled(sender, case, quick=quick)


def _ray_peers(stack: ExitStack, console: Console) -> list:
    """Start Ray and TransferQueue, and return the functions that measure them. TransferQueue is left out if it is not
    installed."""
    import torch

    from benchmarks.paths import ray_store

    torch.set_num_threads(1)
    peers = [(ray_store, stack.enter_context(ray_store.local_ray()))]
    if importlib.util.find_spec("transfer_queue") is None:
        console.print("TransferQueue is not installed, its rows are left out: pip install -e '.[bench]'")
        return peers
    from benchmarks.paths import transfer_queue

    return [*peers, (transfer_queue, stack.enter_context(transfer_queue.local_queue()))]


def _label(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
