"""The jobs of ranks with LoRA. Each function builds an engine, does one task and returns numpy values."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from models.compat.megatron_core import parallel_state
from models.layout.parallel import Parallel
from models.lora.settings import LoraSettings
from models.weights.checkpoint_files import CheckpointFiles
from tests.yatt_mm.training import jobs
from yatt_mm.training.megatron_engine import TrainEngine
from yatt_mm.training.offload import TrainMemory

EVERYWHERE = LoraSettings(rank=4, alpha=6.0, targets=("language", "tower", "merger"))


def with_any_b(engine: TrainEngine) -> TrainEngine:
    """Fill the matrices B, which are 0 at first, with numbers that do not depend on the layout."""
    assert engine._adapters is not None
    for matrix in engine._adapters.matrices():
        if not matrix.name.endswith("lora_B"):
            continue
        random = torch.Generator().manual_seed(len(matrix.name) + sum(matrix.name.encode()))
        whole = torch.randn(512, matrix.param.shape[1], generator=random) / 20
        flat = matrix.param.detach().view(-1)
        for part in matrix.stretches:
            row, column = part.offset
            values = whole[row : row + part.shape[0], column : column + part.shape[1]]
            flat[part.start : part.start + values.numel()] = values.reshape(-1)
    return engine


def score(rank: int, folder: Path, parallel: Parallel, lora: LoraSettings, out: Path | None) -> dict[str, Any]:
    """Return log-probabilities by the number of the sample, and the gradients of adapters by name; write the export."""
    engine = with_any_b(jobs.build_engine(folder, parallel, lora=lora))
    if out is not None:
        engine.save_hf(out)
    scored = jobs.score(engine)
    mine = jobs.GROUPS[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    places = [sample for group in mine for sample in group]
    logprobs = {place: values for place, (values, _) in zip(places, scored)}
    return {"logprobs": logprobs, "gradients": adapter_gradients(engine)}


def adapter_gradients(engine: TrainEngine) -> dict[str, np.ndarray]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for chunk in engine._ddp:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    assert engine._adapters is not None
    for matrix in engine._adapters.matrices():
        matrix.param.data = matrix.param.main_grad  # type: ignore[attr-defined]
    return {name: tensor.clone().numpy() for name, tensor in engine._adapters.weights}


def splits(rank: int, folder: Path) -> list[dict[str, np.ndarray]]:
    """Return the gradients of the same samples, divided into microbatches in several ways."""
    found = []
    for groups in ([(0, 1, 2, 3, 4, 5)], [(5, 3), (4, 0, 2, 1)], [(), (0, 1, 2), (), (3, 4, 5), ()]):
        engine = with_any_b(jobs.build_engine(folder, Parallel(), lora=EVERYWHERE))
        jobs.zero_gradients(engine)
        engine._run(jobs.microbatches(engine, groups), 1.0, jobs.weighted_loss)
        found.append(adapter_gradients(engine))
    return found


def trained(rank: int, folder: Path, parallel: Parallel, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a few updates, the weights without adapters before and after them, the matrices before them, and how many
    values are trained and have optimizer state."""
    engine = jobs.build_engine(folder, parallel, **settings)
    adapters = engine._adapters
    assert adapters is not None
    matrices = {name: tensor.clone().numpy() for name, tensor in adapters.weights}
    with mock.patch.object(adapters, "_of_weight", {}):
        before = jobs.exported(engine)
        done = jobs._steps(engine, 3, jobs.TEXT_LAST)
        after = jobs.exported(engine)
    num_states = sum(buffer.numel for chunk in engine._ddp for buffer in chunk.buffers)
    num_trained = sum(matrix.param.numel() for matrix in adapters.matrices())
    return done | {
        "matrices": matrices,
        "base": (before, after),
        "weights": jobs.exported(engine),
        "num_states": num_states,
        "num_trained": num_trained,
    }


def trained_beside(
    rank: int, folder: Path, references: dict[str, Path], parallel: Parallel, lora: LoraSettings
) -> dict[str, Any]:
    """Return three updates; before the last one, the log-probabilities of each reference, and how often the weights
    of each had to be swapped."""
    engine = jobs.build_engine(folder, parallel, lora=lora)
    done = jobs._steps(engine, 2)
    measured, num_swaps = {}, {}
    own = engine.logprobs(jobs.microbatches(engine))
    for name, reference in references.items():
        with mock.patch.object(TrainMemory, "lent", autospec=True, side_effect=TrainMemory.lent) as lent:
            with engine.weights_of(CheckpointFiles(reference)):
                measured[name] = engine.logprobs(jobs.microbatches(engine))
        num_swaps[name] = lent.call_count
    again = engine.logprobs(jobs.microbatches(engine))
    assert all(np.array_equal(a, b) for x, y in zip(own, again) for a, b in zip(x, y, strict=True))
    last = jobs._steps(engine, 1)
    losses = {name: done[name] + last[name] for name in done}
    return losses | {"measured": measured, "num_swaps": num_swaps, "weights": jobs.exported(engine)}


def logprobs(rank: int, folder: Path, parallel: Parallel, lora: LoraSettings | None = None) -> list[list[np.ndarray]]:
    """Return the log-probabilities of a folder's model before any update."""
    engine = jobs.build_engine(folder, parallel, lora=lora)
    return engine.logprobs(jobs.microbatches(engine))


def export_after_training(rank: int, folder: Path, parallel: Parallel, lora: LoraSettings, out: Path) -> None:
    """Write the export of a model that was trained a little."""
    engine = jobs.build_engine(folder, parallel, lora=lora)
    jobs._steps(engine, 2)
    engine.save_hf(out)
