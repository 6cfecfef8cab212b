"""Tests that training ranks publish into one segment: all tensors, from every layout, and none that is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import build_folder
from yatt_mm.weights import rank_agreement, segment_publisher
from yatt_mm.weights.segment import SegmentError, read_segment
from yatt_mm.weights.segment_publisher import SegmentPublisher


def publish_often(
    rank: int, model_dir: Path, parallel: Parallel, directory: Path, hosts: int, has_models: bool
) -> list[str]:
    """Publish to each of `hosts` hosts: good weights, weights that are not finite, good ones again. Return the
    errors. `has_models`: True if every host has ranks that hold a whole model."""
    engine = jobs.build_engine(model_dir, parallel)
    host = rank * hosts // parallel.world_size
    raised = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_publisher, "_host", lambda folder: (f"host {host}", 0))
        publishing = SegmentPublisher(engine.weights, directory / str(host) / "policy")
    assert publishing.is_gathered == (not has_models)
    for version, value in enumerate((0.0, torch.nan, 0.0)):
        # the first value, for the last may be padding; of one rank, unless replicas hold the same
        last = list(engine._model.parameters())[-1].data.view(-1)
        kept = last[0].clone()
        if value and (parallel.dp > 1 or rank == parallel.world_size - 1):
            last[0] = value
        try:
            publishing.publish(version)
        except (FloatingPointError, rank_agreement.PublishError) as error:
            raised.append(f"{type(error).__name__} at version {version}: {error}")
            if rank == 0:
                with pytest.raises(SegmentError, match="is being written"):
                    next(read_segment(directory / "0" / "policy"))
        last[0] = kept
        dist.barrier()
    return raised


@pytest.mark.parametrize(
    ("family", "parallel", "hosts", "has_models"),
    [
        ("qwen2_5_vl", Parallel(tp=2, pp=2), 1, True),
        ("qwen2_5_vl", Parallel(tp=2, pp=2), 2, False),
        ("qwen2_5_vl", Parallel(dp=2), 1, True),
        ("qwen2_5_vl", Parallel(tp=2, dp=2), 2, True),
        ("qwen3_vl_moe", Parallel(ep=2, dp=4), 1, True),
        ("qwen3_vl_moe", Parallel(ep=2, dp=4), 2, True),
    ],
)
def test_every_rank_writes_its_part_and_spoilt_weights_are_refused_by_all(
    family: str, parallel: Parallel, hosts: int, has_models: bool, ranks: RankPool, tmp_path: Path
) -> None:
    folder = build_folder(tmp_path / "model", family)
    raised = ranks.run(parallel.world_size, publish_often, folder, parallel, tmp_path, hosts, has_models)
    original = load_file(folder / "model.safetensors")
    for host in range(hosts):
        found = {name: tensor.clone() for name, tensor in read_segment(tmp_path / str(host) / "policy", 2)}
        assert found.keys() == original.keys()
        assert all(torch.equal(found[name], original[name]) for name in found)
    assert all(len(messages) == 1 and "at version 1" in messages[0] for messages in raised)
    assert any("has values that are not finite" in messages[0] for messages in raised)
