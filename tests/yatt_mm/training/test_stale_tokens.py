"""Tests of tokens that an older policy sampled: they are weighted against that policy, and left out of the comparison
with the engine."""

from __future__ import annotations

import dataclasses
import tempfile
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
from models.weights.checkpoint_files import CheckpointFiles
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.algorithms.settings import AlgorithmSettings, CorrectionSettings, KlSettings
from yatt_mm.common.reference_folders import ReferenceFolders
from yatt_mm.generation.metrics import add_update, finish_update
from yatt_mm.protocol import group_record
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.protocol.placement_model import State
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.protocol.step_meter import StepMeter, merge
from yatt_mm.protocol.training import TrainSpec, UpdateReport
from yatt_mm.training.step_plan import Minibatch, PlannedSample, UpdatePlan
from yatt_mm.training.worker import TrainWorker

PROMPT = [20, 21, 22, 23]
RESPONSES = ([30, 31, 32, 33, 34], [40, 41, 42])
VERSIONS = ([0, 0, 1, 2, 2], [2, 2, 2])
ADVANTAGES = (1.0, -0.5)
NUM_TOKENS = 8
CLIP = 0.2
CLIP_LOW, CLIP_HIGH, ENTROPY_COEF = 0.1, 0.3, 0.05
"""Those of the update with ratios of responses."""


def train_spec(model_dir: Path, **settings: Any) -> TrainSpec:
    """Return the settings of a rank that is alone."""
    given = {
        "model_dir": str(model_dir),
        "dtype": "float32",
        "optim": AdamSettings(lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95), clip_grad=0.0),
        "temperature": 1.0,
        "seed": 1,
        "timeout_s": 60,
        "recompute": "none",
        "freeze": (),
        "overlap_grad_reduce": False,
        "references": None,
        "skipped_dir": "",
        "carrier": "shm",
        "num_receivers": 0,
        "deadline_s": 60,
    }
    return TrainSpec(**given | settings)


def trained(rank: int, model_dir: Path, uri: str, folder: Path) -> dict[str, Any]:
    """Train one step with one minibatch and one with two, at policy version 2, on a group in which three tokens are
    older."""
    dist.destroy_process_group()  # the worker makes its own
    spec = train_spec(model_dir, algorithm=AlgorithmSettings(clip_low=CLIP, clip_high=CLIP))
    worker = TrainWorker(rank=0, spec=spec, parallel=Parallel(), dataplane_uri=uri)
    with tempfile.TemporaryDirectory() as store, Client(uri) as client:
        worker.start(f"file://{Path(store) / 'store'}")
        worker.set_state(State.WEIGHTS_ONLY)
        worker.publish(str(folder / "policy"), 2)
        worker.set_state(State.AWAKE)
        found = {"corrected": _corrected(worker, client), "empty": _without_weight(worker, client)}
        found["sequences"] = _by_sequences(worker, client)
        found["full"] = _with_a_full_device(worker, client)
        found["reference"] = _with_a_reference(worker, client, model_dir)
        for num_updates, name in ((2, "twice"), (1, "once")):
            current = _current_logprobs(worker, client, name)
            # the engine: 0.5 away where it was an older policy, and all but equal where it was this one
            engine = [
                (now + np.where(np.array(versions) < 2, 0.5, 1e-4)).astype(np.float32)
                for now, versions in zip(current, VERSIONS)
            ]
            worker._step = 2
            plan = _plan(client, name, engine, num_minibatches=num_updates)
            report = worker.update(plan, 3)
            found[name] = {"report": report, "current": current, "engine": engine}
        found["again"] = _again(worker, client, plan, report)
    return found


def _with_a_full_device(worker: TrainWorker, client: Client) -> str:
    """Return the error of an update on a device that has no memory left."""
    worker._step = 2
    plan = _plan(client, "full", [np.zeros(len(ids), np.float32) for ids in RESPONSES])
    with mock.patch.object(worker._engine, "step", side_effect=torch.OutOfMemoryError("tried to allocate 548 MiB")):
        try:
            worker.update(plan, 3)
        except RuntimeError as error:
            return str(error)
    return "none"


def _with_a_reference(worker: TrainWorker, client: Client, model_dir: Path) -> dict[str, Any]:
    """Return an update whose loss keeps the policy near the model from which it was trained."""
    plain = worker._spec
    algorithm = dataclasses.replace(plain.algorithm, kl=KlSettings(where="loss", estimator="k3", coef=0.5))
    current = _current_logprobs(worker, client, "near")
    with worker._engine.weights_of(CheckpointFiles(model_dir)):
        reference = _current_logprobs(worker, client, "reference")
    references = ReferenceFolders(first=Path("of the first step"), renewed=model_dir.parent, every=2)
    (model_dir.parent / "step_000002").symlink_to(model_dir)
    worker._step, worker._spec = 2, dataclasses.replace(plain, references=references, algorithm=algorithm)
    report = worker.update(_plan(client, "near the reference", current), 3)
    before = _current_logprobs(worker, client, "before divergences")
    in_reward = dataclasses.replace(algorithm, kl=KlSettings(where="reward", estimator="k2"))
    worker._spec = dataclasses.replace(worker._spec, algorithm=in_reward)
    engine = [now + np.float32(0.25) for now in current]
    divergences = worker.divergences(_plan(client, "of the engine", engine), 4)
    after = _current_logprobs(worker, client, "after divergences")
    lost = dataclasses.replace(references, every=0)
    found_step, worker._spec = worker._step, dataclasses.replace(worker._spec, references=lost)
    try:
        worker.divergences(_plan(client, "of a lost reference", engine), 4)
    except OSError:
        settled = worker.settle()
        worker.set_state(State.AWAKE)
    worker._step = found_step
    assert all(np.array_equal(now, then) for now, then in zip(before, after, strict=True))
    worker._spec = plain
    return {
        "current": current,
        "reference": reference,
        "report": report,
        "engine": engine,
        "divergences": divergences,
        "settled": settled,
        "step": worker._step,
    }


def _corrected(worker: TrainWorker, client: Client) -> dict[str, Any]:
    """Return an update with one minibatch and one with two, where the loss corrects for the engine's policy."""
    plain = worker._spec
    correction = CorrectionSettings(kind="tis", cap=1.5)
    algorithm = dataclasses.replace(plain.algorithm, correction=correction)
    worker._spec = dataclasses.replace(plain, algorithm=algorithm)
    current = _current_logprobs(worker, client, "corrected")
    engine = [
        (now - np.where(np.array(versions) < 2, [0.5, 0.2, -0.3, 0, 0][: len(now)], 0.1)).astype(np.float32)
        for now, versions in zip(current, VERSIONS)
    ]
    found: dict[str, Any] = {"current": current, "engine": engine}
    for num_updates, name in ((1, "one"), (2, "two")):
        worker._step = 2
        found[name] = worker.update(_plan(client, f"corrected {name}", engine, num_minibatches=num_updates), 3)
        samples = worker._resolve(_plan(client, f"again {name}", engine), 3).minibatches[0]
        worker._measure_old_logprobs(samples)
        found["measured"] = [sample.sampled for sample in samples[0]]
        found["weights"] = worker._engine.logprobs(samples)[0]
    worker._spec = plain
    return found


def _by_sequences(worker: TrainWorker, client: Client) -> UpdateReport:
    """Return an update whose ratios are those of responses. Both have old tokens: those of the first have become more
    likely by 0.9, so that its ratio is exp(2.7 / 5), and that of the second less by 0.6: exp(-0.6 / 3)."""
    plain = worker._spec
    algorithm = AlgorithmSettings(name="gspo", clip_low=CLIP_LOW, clip_high=CLIP_HIGH, entropy_coef=ENTROPY_COEF)
    worker._spec, worker._step = dataclasses.replace(plain, algorithm=algorithm), 2
    first, second = _current_logprobs(worker, client, "of sequences")
    engine = [first - np.float32([0.9, 0.9, 0.9, 0, 0]), second + np.float32([0.6, 0, 0])]
    report = worker.update(_plan(client, "sequences", engine, versions=([0, 0, 1, 2, 2], [1, 2, 2])), 3)
    worker._spec = plain
    return report


def _without_weight(worker: TrainWorker, client: Client) -> tuple[bool, UpdateReport]:
    """Return whether the weights stay in an update in which no response counts, and its report. There is momentum from
    earlier updates."""
    before = _current_logprobs(worker, client, "counted")
    plan = _plan(client, "empty", before)
    empty = dataclasses.replace(plan.minibatches[0], total_weight=0.0)
    worker._step = 2
    report = worker.update(dataclasses.replace(plan, minibatches=(empty,)), 3)
    after = _current_logprobs(worker, client, "not counted")
    return all(np.array_equal(now, then) for now, then in zip(after, before, strict=True)), report


def _again(worker: TrainWorker, client: Client, plan: UpdatePlan, report: UpdateReport) -> dict[str, Any]:
    """Return what a rank does when controllers come again after a fault."""
    before = _current_logprobs(worker, client, "kept")
    is_same_report = worker.update(plan, 3) is report
    after = _current_logprobs(worker, client, "still")
    refused = []
    for step in (2, 5):
        try:
            worker.update(plan, step)
        except RuntimeError as error:
            refused.append(str(error))
    worker.pass_over(4)
    worker.pass_over(4)
    settled = worker.settle()
    worker.set_state(State.AWAKE)
    try:
        worker.update(dataclasses.replace(plan, groups=()), 5)
    except IndexError:
        broken = worker.settle()
    return {
        "is_same_report": is_same_report,
        "weights_stay": all(np.array_equal(now, then) for now, then in zip(after, before, strict=True)),
        "refused": refused,
        "settled": settled,
        "broken": broken,
    }


def _current_logprobs(worker: TrainWorker, client: Client, name: str) -> list[np.ndarray]:
    plan = _plan(client, f"before {name}", [np.zeros(len(ids), np.float32) for ids in RESPONSES])
    (minibatch,) = worker._resolve(plan, 3).minibatches
    return worker._engine.logprobs(minibatch)[0]


def _plan(
    client: Client,
    name: str,
    logprobs: list[np.ndarray],
    *,
    num_minibatches: int = 1,
    versions: tuple[list[int], ...] = VERSIONS,
) -> UpdatePlan:
    samples = tuple(
        group_record.SampleRecord(
            token_ids=np.array(ids),
            logprobs=values,
            policy_versions=np.array(sampled_by),
            text="",
            finish_reason="stop",
        )
        for ids, values, sampled_by in zip(RESPONSES, logprobs, versions, strict=True)
    )
    ref = client.put(
        group_record.encode(group_record.GroupRecord(prompt_token_ids=np.array(PROMPT), samples=samples)), name=name
    )
    group = GroupRef(
        slot=0,
        ref=ref,
        media=(),
        num_prompt_tokens=len(PROMPT),
        lengths=tuple(map(len, RESPONSES)),
        policy_versions=tuple((min(sampled_by), max(sampled_by)) for sampled_by in versions),
        finish_reasons=("stop", "stop"),
    )
    planned = tuple(
        PlannedSample(group=0, row=row, advantage=advantage, token_weight=1 / NUM_TOKENS)
        for row, advantage in enumerate(ADVANTAGES)
    )
    minibatch = Minibatch(microbatches=(planned,), total_weight=1.0)
    return UpdatePlan(groups=(group,), minibatches=(minibatch,) * num_minibatches)


@pytest.fixture(scope="module")
def found(ranks: RankPool, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with EmbeddedNode(memory_bytes=2**24, roots={}, num_workers=1) as node:
        return ranks.run(1, trained, tiny_dir, node.uri, tmp_path_factory.mktemp("weights"))[0]


def test_a_stale_token_is_weighed_against_the_policy_that_sampled_it(found: dict[str, Any]) -> None:
    once = found["once"]
    loss = 0.0
    for now, engine, versions, advantage in zip(once["current"], once["engine"], VERSIONS, ADVANTAGES, strict=True):
        ratio = np.where(np.array(versions) < 2, np.exp(now - engine), 1.0)
        surrogate = np.minimum(ratio * advantage, ratio.clip(1 - CLIP, 1 + CLIP) * advantage)
        loss -= surrogate.sum() / NUM_TOKENS
    report: UpdateReport = once["report"]
    assert report.loss_metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert report.loss_metrics["approx_kl"] == pytest.approx(3 / NUM_TOKENS * (np.exp(-0.5) - 1 + 0.5), abs=1e-5)


def test_a_rank_trains_with_the_surrogate_clips_and_entropy_bonus_of_its_settings(found: dict[str, Any]) -> None:
    metrics = found["sequences"].loss_metrics
    assert np.exp(2.7 / 5) > 1 + CLIP_HIGH and np.exp(-0.6 / 3) < 1 - CLIP_LOW
    values = [5 * (1 + CLIP_HIGH) * ADVANTAGES[0], 3 * (1 - CLIP_LOW) * ADVANTAGES[1]]
    assert metrics["entropy"] > 1
    assert metrics["loss"] == pytest.approx(-sum(values) / NUM_TOKENS - ENTROPY_COEF * metrics["entropy"], abs=1e-6)
    assert metrics["clip_frac"] == pytest.approx(1.0)


def test_an_update_in_which_no_response_counts_changes_nothing(found: dict[str, Any]) -> None:
    weights_stay, report = found["empty"]
    assert weights_stay and not report.loss_metrics and not report.num_skipped


def test_a_correction_weighs_tokens_against_the_engine_and_their_ratios_begin_at_one(found: dict[str, Any]) -> None:
    found = found["corrected"]
    loss, mean = 0.0, 0.0
    for now, engine, advantage in zip(found["current"], found["engine"], ADVANTAGES, strict=True):
        weights = np.minimum(np.exp(now - engine), 1.5)
        mean += weights.sum() / NUM_TOKENS
        loss -= (weights * advantage).sum() / NUM_TOKENS
    report: UpdateReport = found["one"]
    assert report.loss_metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert report.loss_metrics["correction_mean"] == pytest.approx(mean, abs=1e-6)
    assert report.loss_metrics["cut_frac"] == pytest.approx(1 / NUM_TOKENS), "exp(0.5) is above 1.5"
    assert report.loss_metrics["clip_frac"] == 0.0
    assert report.loss_metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6), "stale tokens too begin at one"
    meter = StepMeter()
    add_update(meter, report)
    record = merge([meter])
    finish_update(record)
    squares = report.loss_metrics["correction_squares"]
    assert record["train/ess_frac"] == pytest.approx(mean**2 / squares) and "train/correction_squares" not in record
    assert found["two"].loss_metrics["approx_kl"] > 0, "the second update is away from the start of the step"
    for tokens, now in zip(found["measured"], found["weights"], strict=True):
        assert np.array_equal(tokens.old_logprobs, now) and not tokens.is_current.any(), "also those of stale tokens"


@pytest.mark.parametrize("name", ["once", "twice"])
def test_stale_tokens_are_counted_and_not_compared_with_the_engine(found: dict[str, Any], name: str) -> None:
    meter = StepMeter()
    add_update(meter, found[name]["report"])
    metrics = merge([meter])
    assert metrics["rollout/stale_tokens_frac"] == 3 / NUM_TOKENS
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(1e-4, rel=0.05)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(1e-4, rel=0.05)


def test_a_rank_trains_a_step_once_however_often_controllers_come_with_it(found: dict[str, Any]) -> None:
    again = found["again"]
    assert again["is_same_report"] and again["weights_stay"]
    assert again["refused"] == [f"training rank 0 is at step 3 and cannot go to step {step}" for step in (2, 5)]


def test_a_rank_says_which_step_its_weights_have_and_none_after_an_update_that_failed(found: dict[str, Any]) -> None:
    assert found["again"]["settled"] == 4 and found["again"]["broken"] is None


def test_an_update_for_which_the_device_is_too_small_says_what_to_set(found: dict[str, Any]) -> None:
    assert found["full"] == (
        "an update needs more memory than the device has: lower train.max_tokens_per_microbatch (and "
        "train.max_patches_per_microbatch), or set train.recompute to full, or set model.dtype to bfloat16. "
        "tried to allocate 548 MiB"
    )


def test_the_divergence_from_the_reference_is_in_loss_and_metrics(found: dict[str, Any]) -> None:
    near = found["reference"]
    gaps = [now - then for now, then in zip(near["current"], near["reference"], strict=True)]
    divergence = sum(float((np.exp(-gap) - 1 + gap).sum()) for gap in gaps) / NUM_TOKENS
    surrogate = sum(len(gap) * advantage for gap, advantage in zip(gaps, ADVANTAGES, strict=True)) / NUM_TOKENS
    metrics = near["report"].loss_metrics
    assert divergence > 1e-6, "the policy was trained since"
    assert metrics["kl"] == pytest.approx(divergence, rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.5 * divergence - surrogate, abs=1e-6)


def test_the_divergence_of_a_response_is_that_of_the_policy_that_sampled_it(found: dict[str, Any]) -> None:
    near = found["reference"]
    wanted = [float(((engine - then) ** 2 / 2).sum()) for engine, then in zip(near["engine"], near["reference"])]
    assert [(name, row) for name, row, _ in near["divergences"]] == [("of the engine", 0), ("of the engine", 1)]
    assert [value for _, _, value in near["divergences"]] == pytest.approx(wanted, rel=1e-5)
    assert near["step"] == 3, "nothing was trained"
    assert near["settled"] is None, "as after an update that failed, so that its own error ends the run"
