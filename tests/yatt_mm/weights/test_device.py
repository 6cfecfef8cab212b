"""Tests of publishing in the memory of devices, with the calls to CUDA replaced by fakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import build_folder
from yatt_mm.protocol.published import DeviceSegment, Published, segment_on
from yatt_mm.weights import cuda_ipc
from yatt_mm.weights.carriers import resolve_carrier
from yatt_mm.weights.device_publisher import DevicePublisher
from yatt_mm.weights.rank_agreement import PublishError
from yatt_mm.weights.segment import views

CPU = torch.device("cpu")
HANDLE = (b"", 0, 0, b"", 0, b"", False)


def publish_on_devices(rank: int, model_dir: Path, parallel: Parallel) -> dict[str, Any]:
    """Publish once with a value that is refused, and then again. Return what an engine next to each rank then reads."""
    engine = jobs.build_engine(model_dir, parallel)
    shared: list[torch.Tensor] = []

    def share(flat: torch.Tensor) -> tuple[str, cuda_ipc.Handle]:
        shared.append(flat)
        return f"gpu {rank}", HANDLE

    publisher = DevicePublisher(engine.weights, CPU)
    first = next(engine._model.parameters()).data.view(-1)
    kept = first[0].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "share", share)
        first[0] = torch.nan
        with pytest.raises((FloatingPointError, PublishError), match="not finite"):
            publisher.publish(1)
        assert not shared
        first[0] = kept
        segment = publisher.publish(2)
    found = {name: tensor.numpy().copy() for name, tensor in views(shared[0], segment.index)}
    assert publisher._flat is shared[0]
    publisher.release()
    assert publisher._flat is None
    return {"gpu": segment.gpu, "found": found}


def test_every_rank_publishes_the_whole_model_on_its_own_device(ranks: RankPool, tmp_path: Path) -> None:
    folder = build_folder(tmp_path)
    original = load_file(folder / "model.safetensors")
    for rank, result in enumerate(ranks.run(2, publish_on_devices, folder, Parallel(tp=2))):
        assert result["gpu"] == f"gpu {rank}"
        assert result["found"].keys() == original.keys()
        assert all(np.array_equal(result["found"][name], original[name].numpy()) for name in original)


def test_an_engine_reads_what_was_published_on_its_own_gpu() -> None:
    segments = tuple(DeviceSegment(gpu=f"gpu {i}", index=b"", handle=HANDLE) for i in range(3))
    devices = Published(version=1, path="", devices=segments).update_info()["devices"]
    assert segment_on("gpu 1", devices)["gpu"] == "gpu 1"
    with pytest.raises(ValueError, match=r"on GPU gpu 7, only on gpu 0, gpu 1, gpu 2; .* set weights\.carrier=shm"):
        segment_on("gpu 7", devices)


def test_the_carrier_follows_from_the_device_unless_the_config_says_it() -> None:
    gpu = torch.device("cuda", 0)
    assert [resolve_carrier("auto", device) for device in (CPU, gpu)] == ["shm", "cuda_ipc"]
    assert [resolve_carrier("shm", device) for device in (CPU, gpu)] == ["shm", "shm"]
    with pytest.raises(ValueError, match=r"weights\.carrier is cuda_ipc, but the training ranks compute on the cpu"):
        resolve_carrier("cuda_ipc", CPU)
