"""Tests of broadcasting weights to receivers that share no memory with the ranks, and of the errors that name missing
receivers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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
from yatt_mm.protocol.published import WeightStream
from yatt_mm.weights import buckets as streams
from yatt_mm.weights.rank_agreement import PublishError
from yatt_mm.weights.stream_group import StreamError, StreamGroup, open_store
from yatt_mm.weights.stream_publisher import Receivers, StreamPublisher

CPU = torch.device("cpu")


def publisher_of(model_dir: Path, parallel: Parallel, *, num: int, deadline_s: float) -> tuple[Any, StreamPublisher]:
    engine, receivers = jobs.build_engine(model_dir, parallel), Receivers(num=num, deadline_s=deadline_s)
    return engine, StreamPublisher(engine.weights, CPU, str(model_dir / "meeting"), receivers)


def taken(stream: WeightStream, name: str) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in streams.receive(stream, CPU, name)}


def send_twice(rank: int, model_dir: Path, parallel: Parallel) -> list[dict[str, np.ndarray]]:
    """Send the weights twice, and return what the two receivers in the first rank's process got the second time.
    Buckets are smaller than most tensors."""
    streams.BUCKET_BYTES = 4096
    engine, publisher = publisher_of(model_dir, parallel, num=2, deadline_s=60)
    first = next(engine._model.parameters()).data.view(-1)
    kept = first[0].clone()
    first[0] = 7.0
    received: list[dict[str, np.ndarray]] = []
    for version in (1, 2):
        stream = publisher.publish(version)
        first[0] = kept
        if stream:
            with ThreadPoolExecutor() as pool:
                received = list(pool.map(taken, [stream, stream], ["engine 0", "engine 1"]))
        publisher.release()
    return received


def test_every_receiver_gets_the_whole_model_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    folder = build_folder(tmp_path)
    original = load_file(folder / "model.safetensors")
    received, nothing = ranks.run(2, send_twice, folder, Parallel(tp=2))
    assert not nothing and len(received) == 2
    for found in received:
        assert found.keys() == original.keys()
        assert all(np.array_equal(found[name], original[name].numpy()) for name in original)


def fail_in_three_ways(rank: int, model_dir: Path) -> bool:
    """Return whether this rank was given a stream, so that it tried all three ways."""
    engine, publisher = publisher_of(model_dir, Parallel(tp=2), num=2, deadline_s=8)
    first = next(engine._model.parameters()).data.view(-1)
    kept = first[0].clone()
    if rank == 1:
        first[0] = torch.nan
    with pytest.raises((FloatingPointError, PublishError), match="not finite"):
        publisher.publish(1)
    assert not list(model_dir.glob("meeting*")), "something was announced"
    first[0] = kept

    stream = publisher.publish(2)
    if stream:
        with pytest.raises(StreamError, match=r"engine 0 waited 8 s for the 2 receivers .*; these came: engine 0$"):
            list(streams.receive(stream, CPU, "engine 0"))
        with pytest.raises(
            StreamError, match=r"training rank 0 waited 8 s for the 2 receivers of version 2 .* engine 0$"
        ):
            publisher.release()
    publisher.release()

    stream = publisher.publish(3)
    if stream:
        with ThreadPoolExecutor() as pool:
            leaving = pool.submit(lambda: StreamGroup(stream, open_store(stream), CPU, "engine 0").close())
            with pytest.raises(StreamError, match=r"training rank 0 went away, or kept others waiting"):
                list(streams.receive(stream, CPU, "engine 1"))
            leaving.result()
        with pytest.raises(
            StreamError, match=r"the receivers of version 3 .* went away, or kept others waiting for 8 s"
        ):
            publisher.release()
    return stream is not None


def test_a_missing_rank_is_named_within_the_deadline(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, fail_in_three_ways, build_folder(tmp_path)) == [True, False]
