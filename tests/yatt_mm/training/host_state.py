"""Optimizer state on the host, on a machine without a GPU: a stand-in for the question where a tensor is.

megatron's optimizer keeps a share of the state on the host by copying main weights from the GPU. Here the same code
runs, and only takes tensors that it did not copy for tensors of a GPU. `tests/gpu` has the same tests on a real one.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from models.compat import megatron_core  # noqa: F401  prepares megatron
from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from yatt_mm.training import optimizer


def train_and_continue(
    rank: int, model_dir: Path, directory: Path, fraction: float
) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Return the results of updates behind a checkpoint, those of the same updates when it was loaded, and the share of
    the main weights that each optimizer keeps on the host."""
    from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

    method = hybrid_optimizer.HybridDeviceOptimizer._get_sub_optimizer_param_groups
    source = textwrap.dedent(inspect.getsource(method))
    for before, after in (
        ("param.is_cuda", "not hasattr(param, 'is_copy')"),
        ("param.detach().clone().cpu().pin_memory()", "param.detach().clone(); param.is_copy = True"),
    ):
        assert before in source
        source = source.replace(before, after)
    made: dict[str, Any] = {}
    exec(source, vars(hybrid_optimizer), made)
    shares = []

    def divide(self: Any, offload_fraction: float) -> tuple[Any, ...]:
        _, _, on_host, *_ = found = made[method.__name__](self, offload_fraction)
        whole = [param for group in self.param_groups for param in group["params"]]
        shares.append(sum(param.numel() for param in on_host) / sum(param.numel() for param in whole))
        return found

    settings = {"offload_frac": fraction}
    with (
        mock.patch.object(hybrid_optimizer.HybridDeviceOptimizer, method.__name__, divide),
        mock.patch.object(optimizer, "device", lambda: torch.device("cuda")),
    ):
        return (
            jobs.train_and_save(rank, model_dir, Parallel(), directory, "bfloat16", settings),
            jobs.load_and_train(rank, model_dir, Parallel(), directory, "bfloat16", settings),
            shares,
        )


def train_in_float32(rank: int, model_dir: Path) -> None:
    """Train a float32 model with optimizer state on the host, which is refused."""
    with mock.patch.object(optimizer, "device", lambda: torch.device("cuda")):
        jobs.build_engine(model_dir, Parallel(), offload_frac=0.5)
