"""Tests of publishing in the memory of devices, from the ranks' weights to the model of an engine. Fakes replace the
calls to CUDA."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
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

CPU = torch.device("cpu")
HANDLE = (b"\x00cuda\xff", 2**40, 512, b"\x80counter", 7, b"event\x00", True)
"""A handle with values of the sizes that CUDA gives; a rank's number is added to its second value."""


def publish_on_devices(rank: int, model_dir: Path, parallel: Parallel, path: Path) -> dict[str, Any]:
    """Publish once with a value that is refused, and then again. Return what an engine next to each rank then reads."""
    engine = jobs.build_engine(model_dir, parallel)
    shared: list[torch.Tensor] = []

    def share(flat: torch.Tensor) -> tuple[str, cuda_ipc.Handle]:
        shared.append(flat)
        return f"gpu {rank}", handle_of(rank)

    publisher = DevicePublisher(engine.weights, CPU, path)
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
    flat = shared[0].numpy().copy()
    assert publisher._flat is shared[0]
    publisher.release()
    assert publisher._flat is None
    return {"segment": segment, "flat": flat}


def handle_of(rank: int) -> cuda_ipc.Handle:
    return (HANDLE[0], HANDLE[1] + rank, *HANDLE[2:])


class Model:
    """A model that keeps what it is told to load."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded = {name: tensor.numpy().copy() for name, tensor in weights}


def test_every_rank_publishes_the_whole_model_and_an_engine_loads_what_is_on_its_own_gpu(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from yatt_mm.rollout import weight_transfer  # imports vLLM

    folder = build_folder(tmp_path)
    original = load_file(folder / "model.safetensors")
    path = tmp_path / "weights" / "policy"
    results = ranks.run(2, publish_on_devices, folder, Parallel(tp=2), path)
    assert [file.name for file in path.parent.iterdir()] == ["policy.index"]
    published = Published.of(2, str(path), [result["segment"] for result in results])
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(published.update_info()))  # as to vLLM's processes
    memory = {handle_of(rank): torch.from_numpy(result["flat"]) for rank, result in enumerate(results)}
    monkeypatch.setattr(weight_transfer, "open_shared", lambda handle, device: memory.pop(tuple(handle)))
    for rank in (1, 0):
        monkeypatch.setattr(weight_transfer, "gpu_uuid", lambda device, name=f"gpu {rank}": name)
        engine = object.__new__(weight_transfer.ShmWeightTransferEngine)
        engine.device, engine.model = CPU, Model()
        engine.receive_weights(weight_transfer.ShmUpdateInfo(**sent))
        assert engine.model.loaded.keys() == original.keys()
        assert all(np.array_equal(engine.model.loaded[name], original[name].numpy()) for name in original)
    assert not memory, "each engine opened the handle of its own GPU"


def test_an_engine_on_a_gpu_without_a_rank_says_what_to_set() -> None:
    segments = tuple(DeviceSegment(gpu=f"gpu {i}", handle=HANDLE) for i in range(3))
    devices = Published(version=1, path="", devices=segments).update_info()["devices"]
    with pytest.raises(ValueError, match=r"on GPU gpu 7, only on gpu 0, gpu 1, gpu 2; .* set weights\.carrier=shm"):
        segment_on("gpu 7", devices)


def test_the_carrier_follows_from_the_device_unless_the_config_says_it() -> None:
    gpu = torch.device("cuda", 0)
    assert [resolve_carrier("auto", device) for device in (CPU, gpu)] == ["shm", "cuda_ipc"]
    assert [resolve_carrier("shm", device) for device in (CPU, gpu)] == ["shm", "shm"]
    with pytest.raises(ValueError, match=r"weights\.carrier is cuda_ipc, but the training ranks compute on the cpu"):
        resolve_carrier("cuda_ipc", CPU)
