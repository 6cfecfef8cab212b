"""Tests of exporting weights from any layout: described, iterated several times, or copied by each rank into shared
memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models.layout.parallel import Parallel
from models.weights import export_plan
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.weights import rank_agreement

LAYOUTS = {
    "tp1": Parallel(),
    "tp2-pp2": Parallel(tp=2, pp=2),
    "pp2-dp2": Parallel(pp=2, dp=2),
    "tp4": Parallel(tp=4),
}


def read_weights(rank: int, model_dir: Path, parallel: Parallel) -> dict[str, Any]:
    """Return the metadata of the source, the tensors of two passes in small buckets, and the parts that this rank alone
    would write."""
    source = jobs.build_engine(model_dir, parallel).weights
    assert parallel.world_size == 1 or len(list(export_plan.buckets(source._planned))) > 10
    passes = [[(name, tensor.numpy().copy()) for name, tensor in source] for _ in range(2)]
    kept = list(source)  # all at once: no tensor may lie in memory that the next bucket uses
    announced = [(meta.name, meta.shape, str(meta.dtype)) for meta in source.metadata()]
    own = {meta.name: torch.full(meta.shape, torch.nan, dtype=meta.dtype) for meta in source.metadata()}
    models = sorted(set(rank_agreement.gather(source.ranks)))
    for _, part, place in source.own_parts(own, models.index(source.ranks), len(models)):
        assert place.isnan().all(), "written twice"
        place.copy_(part)
    return {
        "announced": announced,
        "passes": [*passes, [(name, tensor.numpy()) for name, tensor in kept]],
        "own": {name: tensor.numpy() for name, tensor in own.items()},
    }


def read_weights_in_small_buckets(rank: int, model_dir: Path, parallel: Parallel) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_plan, "BUCKET_BYTES", 4096)
        return read_weights(rank, model_dir, parallel)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_source_gives_what_it_announces_each_time_and_the_ranks_parts_make_up_the_model(
    name: str, ranks: RankPool, tied_folder: Path
) -> None:
    original = load_file(tied_folder / "model.safetensors")
    parallel = LAYOUTS[name]
    results = ranks.run(parallel.world_size, read_weights_in_small_buckets, tied_folder, parallel)
    for result in results:
        assert result["announced"] == results[0]["announced"]
        for passed in result["passes"]:
            assert [(name, value.shape, f"torch.{value.dtype}") for name, value in passed] == result["announced"]
            for tensor_name, value in passed:
                assert np.array_equal(value, original[tensor_name].numpy()), tensor_name
    for tensor_name, wanted in original.items():
        written = np.stack([result["own"][tensor_name] for result in results])
        assert (np.isfinite(written).sum(0) == 1).all(), f"not every value of {tensor_name} is written once"
        assert np.array_equal(np.nansum(written, 0), wanted.numpy())
