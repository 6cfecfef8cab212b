"""Tests of a training rank with a critic: what an update reports, what sleeps, and what is saved."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from models.layout.parallel import Parallel
from tests.yatt_mm.training import test_stale_tokens as stale
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.algorithms.settings import AlgorithmSettings
from yatt_mm.generation.metrics import add_update
from yatt_mm.protocol.placement_model import State
from yatt_mm.protocol.step_meter import StepMeter, merge
from yatt_mm.protocol.training import CriticSpec, UpdateReport
from yatt_mm.training.megatron_engine import StepResult
from yatt_mm.training.offload import Holding
from yatt_mm.training.worker import TrainWorker


def trained(rank: int, model_dir: Path, uri: str, folder: Path) -> dict[str, Any]:
    """Train the same responses again and again, with sleep, a checkpoint and a failure between."""
    dist.destroy_process_group()  # the worker makes its own
    algorithm = AlgorithmSettings(name="ppo", value_clip=0.2)
    spec = stale.train_spec(model_dir, algorithm=algorithm, skipped_dir=str(folder / "skipped"))
    spec = replace(spec, critic=CriticSpec(model_dir=str(model_dir), optim=spec.optim))
    worker = TrainWorker(rank=0, spec=spec, parallel=Parallel(), dataplane_uri=uri)
    found: dict[str, Any] = {"reports": []}
    with tempfile.TemporaryDirectory() as store, Client(uri) as client:
        worker.start(f"file://{Path(store) / 'store'}")
        assert worker._critic is not None
        engine = worker._critic.engine
        plan = stale._plan(client, "first", stale._current_logprobs(worker, client, "now"), num_minibatches=2)
        for step in range(1, 7):
            found["reports"].append(worker.update(plan, step))
        worker.save(str(folder / "checkpoint"), asynchronous=False)
        memories = (worker._engine.memory, engine.memory)
        found["bytes"] = sum(memory.resident_bytes(part) for memory in memories for part in Holding)
        moved = {}
        for state in (State.WEIGHTS_ONLY, State.ASLEEP, State.AWAKE):
            moved[state] = worker.set_state(state)
            found[state] = sum(engine.memory.resident_bytes(part) for part in Holding)
        found["released"] = sum(one.released_bytes for one in moved.values())
        found["restored"] = sum(one.restored_bytes for one in moved.values())
        found["next"] = [worker.update(plan, 7), worker.update(plan, 8)]
        worker.load(str(folder / "checkpoint"), 6)
        found["again"] = [worker.update(plan, 7), worker.update(plan, 8)]
        nothing = StepResult(loss_metrics={}, grad_norm=float("nan"), was_skipped=True, logprobs=[])
        with mock.patch.object(worker._critic, "step", return_value=nothing):
            found["critic alone"] = worker.update(plan, 9)
        (head,) = (param for name, param in engine._model.named_parameters() if "value_head" in name)
        head.data.fill_(float("nan"))
        found["spoilt"] = worker.update(plan, 10)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("critic")


@pytest.fixture(scope="module")
def found(ranks: RankPool, tiny_dir: Path, folder: Path) -> dict[str, Any]:
    with EmbeddedNode(memory_bytes=2**24, roots={}, num_workers=1) as node:
        return ranks.run(1, trained, tiny_dir, node.uri, folder)[0]


def test_the_first_update_has_the_numbers_worked_out_by_hand(found: dict[str, Any]) -> None:
    first: UpdateReport = found["reports"][0]
    scores = np.repeat(
        stale.ADVANTAGES, [len(ids) for ids in stale.RESPONSES]
    )  # lambda 1 and values 0: a token's return
    assert first.critic_values["value_mean"] == 0.0 and first.critic_values["explained_variance"] == 0.0
    assert first.critic_values["return_mean"] == pytest.approx(scores.mean())
    assert first.critic_values["grad_norm"] > 0
    # the mean of two updates; before the first one, ratios are 1, and the whitened advantages have the mean 0
    assert abs(first.loss_metrics["loss"]) < 0.1 < scores.mean()
    assert first.critic_metrics["loss"] == pytest.approx(0.5 * (scores**2).sum() / stale.NUM_TOKENS, rel=0.2)
    meter = StepMeter()
    add_update(meter, first)
    metrics = merge([meter])
    assert metrics["critic/loss"] == first.critic_metrics["loss"]
    assert {"critic/explained_variance", "critic/grad_norm", "critic/clip_frac", "critic/value_mean"} <= metrics.keys()


def test_the_critic_learns_what_the_scores_are(found: dict[str, Any]) -> None:
    reports: list[UpdateReport] = found["reports"]
    assert reports[-1].critic_values["explained_variance"] > 0.5
    assert reports[-1].critic_metrics["loss"] < 0.7 * reports[0].critic_metrics["loss"]


def test_the_critic_is_on_the_device_only_for_updates(found: dict[str, Any]) -> None:
    assert found[State.WEIGHTS_ONLY] == found[State.ASLEEP] == 0 < found[State.AWAKE]
    assert found["released"] == found["restored"] == found["bytes"], "those of both models are counted"


def test_a_rank_goes_on_from_its_checkpoint_with_the_same_bits(found: dict[str, Any]) -> None:
    for after, again in zip(found["next"], found["again"], strict=True):
        assert after.loss_metrics == again.loss_metrics and after.grad_norm == again.grad_norm
        assert after.critic_metrics == again.critic_metrics and after.critic_values == again.critic_values
    assert found["next"][0].critic_metrics != found["next"][1].critic_metrics


def test_an_update_of_a_critic_that_is_not_finite_is_skipped_and_written(found: dict[str, Any], folder: Path) -> None:
    alone: UpdateReport = found["critic alone"]
    assert alone.num_skipped == 2 and not alone.critic_metrics and "grad_norm" not in alone.critic_values
    report: UpdateReport = found["spoilt"]
    assert report.num_skipped == 2 and not report.critic_metrics
    written = np.load(folder / "skipped" / "step_000010" / "update-0-rank-0.npz")
    assert np.isnan(written["0/0/old_values"]).all() and len(written["0/0/returns"]) == len(stale.RESPONSES[0])
    assert not torch.tensor(written["0/0/logprobs"]).isnan().any()
