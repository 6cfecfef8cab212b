"""Weights on a GPU: shared with another process, and what NVML reports as held."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.tiny import build_folder
from yatt_mm.common.held_memory import GPUS_VARIABLE, held_bytes
from yatt_mm.protocol.published import DeviceSegment
from yatt_mm.weights.cuda_ipc import gpu_uuid, open_shared
from yatt_mm.weights.device_publisher import DevicePublisher
from yatt_mm.weights.segment import index_file, views

DEADLINE_S = 120


def _read(pipe: Connection, path: Path) -> None:
    """Open what comes through the pipe, as an engine does, and answer with the tensors' float64 sums."""
    device = torch.device("cuda", 0)
    segment: DeviceSegment = pipe.recv()
    assert segment.gpu == gpu_uuid(device)
    flat = open_shared(segment.handle, device)
    pipe.send({name: float(tensor.double().sum()) for name, tensor in views(flat, index_file(path).read_bytes())})
    del flat
    pipe.recv()


def test_another_process_maps_the_published_weights(world: None, tmp_path: Path) -> None:
    engine = jobs.build_engine(build_folder(tmp_path), Parallel(), dtype="bfloat16")
    path = tmp_path / "policy"
    publisher = DevicePublisher(engine.weights, torch.device("cuda", 0), path)
    segment = publisher.publish(1)
    here, there = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=_read, args=(there, path))
    reader.start()
    try:
        here.send(segment)
        assert here.poll(DEADLINE_S)
        sums = here.recv()
        assert sums == {name: float(tensor.double().sum()) for name, tensor in engine.weights}
        here.send("done")
        reader.join(DEADLINE_S)
        assert reader.exitcode == 0
    finally:
        reader.kill()
    publisher.release()


def test_nvml_reports_what_all_processes_hold_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = f"GPU-{gpu_uuid(torch.device('cuda', 0))}"
    torch.empty(1, device="cuda")  # makes CUDA's context, which takes half a gigabyte
    for name in (os.environ.get("CUDA_VISIBLE_DEVICES", "0"), uuid):
        monkeypatch.setenv(GPUS_VARIABLE, name)
        before = held_bytes()
        block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        assert (1 << 30) <= held_bytes() - before < (1 << 30) + (64 << 20)
        del block
        torch.cuda.empty_cache()
        assert held_bytes() - before < 64 << 20
