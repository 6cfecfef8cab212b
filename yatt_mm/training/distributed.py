"""Joins the training world: torch.distributed first, then megatron's parallel groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from models.compat.megatron_core import parallel_state, tensor_parallel
from models.layout.parallel import Parallel


def init_distributed(
    *,
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float = 600.0,
    num_threads: int = 1,
) -> None:
    """Join the world that meets in `store`: `file://` and the path of a file in a folder that only this user can enter,
    because any process that reaches the store could take part; or `tcp://` and the address of a store that a rank has
    opened.

    The backend is nccl with this process's first visible device on CUDA, otherwise gloo with `num_threads` threads;
    their number is part of what makes two runs bit-identical. Every collective fails after `timeout_s`.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(num_threads)
    timeout = timedelta(seconds=timeout_s)
    where: dict[str, Any] = {"init_method": store}
    if (url := urlsplit(store)).scheme == "tcp":
        assert url.hostname and url.port
        where = {"store": dist.TCPStore(url.hostname, url.port, is_master=False, timeout=timeout)}
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=world_size, timeout=timeout, **where
    )


def init_model_parallel(parallel: Parallel, seed: int) -> None:
    """Make megatron's groups for a layout; they replace earlier ones. All ranks call this."""
    if dist.get_world_size() != parallel.world_size:
        raise ValueError(
            f"{dist.get_world_size()} ranks joined, but {parallel} needs {parallel.world_size}; "
            "start as many ranks as the layout has"
        )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        parallel.tp,
        parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def device() -> torch.device:
    """Return the torch device on which this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
