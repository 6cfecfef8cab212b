"""Tests of the critic on real ranks: its values, losses and gradients do not depend on the layout, it learns, and it is
saved and loaded beside the policy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.algorithms.losses import value_loss
from yatt_mm.algorithms.settings import AlgorithmSettings
from yatt_mm.common.errors import CheckpointError
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.training.critic import Critic
from yatt_mm.training.megatron_engine import TrainEngine
from yatt_mm.training.offload import Holding
from yatt_mm.training.step_plan import Minibatch, PlannedSample, UpdatePlan
from yatt_mm.training.train_sample import TrainSample

SETTINGS = AlgorithmSettings(name="ppo", gamma=0.9, gae_lambda=0.8, value_clip=0.03)
SCORES = (1.0, 0.0, 0.5, -1.0, 2.0, 0.25, 1.5, -0.5)
"""The rewards of the eight samples."""
WHOLE = (range(8),)


def build_critic(folder: Path, parallel: Parallel, *, begins_at_zero: bool = False, **settings: Any) -> Critic:
    """Return a critic beside an engine of the policy, which makes the groups. Its head is not 0, so that all of the
    model has a gradient."""
    dtype, freeze = settings.pop("dtype", "float32"), settings.pop("freeze", ())
    jobs.build_engine(folder, parallel, dtype=dtype, freeze=freeze)
    return critic_beside(folder, parallel, begins_at_zero=begins_at_zero, dtype=dtype, freeze=freeze, **settings)


def critic_beside(
    folder: Path, parallel: Parallel, *, begins_at_zero: bool, dtype: str = "float32", freeze: Any = (), **adam: Any
) -> Critic:
    """Return a critic in the groups of an engine that was made before it."""
    defaults: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "clip_grad": 0.0}
    engine = TrainEngine(
        model_dir=folder,
        parallel=parallel,
        optim=AdamSettings(**(defaults | adam)),
        dtype=dtype,
        seed=1,
        freeze=freeze,
        scores="values",
    )
    if not begins_at_zero:
        for head in head_of(engine):
            head.data.copy_(torch.linspace(-0.3, 0.3, head.numel()).view_as(head))
    return Critic(engine, SETTINGS)


def head_of(engine: TrainEngine) -> list[torch.Tensor]:
    """Return the weight of the head, on ranks that have it."""
    return [param for name, param in engine._model.named_parameters() if "value_head" in name]


def plan_and_samples(
    engine: TrainEngine, groups: Sequence[Sequence[int]], *, num_minibatches: int = 1
) -> tuple[UpdatePlan, list[list[list[TrainSample]]]]:
    """Return what a replica trains, with the scores of the samples, the same in each minibatch."""
    score = {sample.token_ids.tobytes(): s for sample, s in zip(jobs.make_samples(jobs.form_of(engine)), SCORES)}
    minibatches = [jobs.microbatches(engine, groups) for _ in range(num_minibatches)]
    planned = [
        tuple(
            PlannedSample(group=0, row=0, advantage=score[one.token_ids.tobytes()], token_weight=0.0) for one in micro
        )
        for micro in minibatches[0]
    ]
    minibatch = Minibatch(microbatches=tuple(planned), total_weight=1.0)
    return UpdatePlan(groups=(), minibatches=(minibatch,) * num_minibatches), minibatches


def measured(
    rank: int, folder: Path, parallel: Parallel, groups: Sequence[Sequence[int]], shift: float, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return what the critic makes of the samples, by their tokens, and the loss and the gradients if the old values
    were further away, by `shift` times the number of the token in its response."""
    critic = build_critic(folder, parallel, **settings)
    engine = critic.engine
    plan, minibatches = plan_and_samples(engine, groups)
    metrics = critic.measure(plan, minibatches)
    columns = {}
    for sample in (sample for micro in minibatches[0] for sample in micro):
        tokens = sample.sampled
        assert tokens is not None
        if tokens.old_values is not None and tokens.returns is not None:
            columns[sample.token_ids.tobytes()] = (tokens.old_values, tokens.returns, tokens.advantages)
            tokens.old_values = (tokens.old_values + shift * (np.arange(len(tokens.returns)) - 2)).astype(np.float32)
    jobs.zero_gradients(engine)
    scored = engine._run(minibatches[0], 1.0, functools.partial(value_loss, settings=SETTINGS))
    sums = [sum(float(part.metrics.get(key, 0.0)) for part in scored) for key in ("loss", "clip_frac")]
    total = torch.tensor([engine.is_loss_rank * value for value in sums], dtype=torch.float64)
    dist.all_reduce(total)
    gradients = jobs.gradients(engine)
    for head in head_of(engine):
        gradients["head"] = head.detach().numpy().copy()
    return {"metrics": metrics, "columns": columns, "loss": total.tolist(), "gradients": gradients}


SHIFT = 0.02


@pytest.fixture(scope="module")
def of_one_rank(ranks: RankPool) -> Callable[[Path], dict[str, Any]]:
    """Return for a folder what one rank finds with all samples in one microbatch."""

    @functools.cache
    def of_folder(folder: Path) -> dict[str, Any]:
        return ranks.run(1, measured, folder, Parallel(), WHOLE, SHIFT, {})[0]

    return of_folder


LAYOUTS: list[Any] = [
    Parallel(cp=2),
    Parallel(tp=2, sp=True),
    Parallel(dp=2),
    pytest.param(Parallel(pp=2), marks=pytest.mark.parity),
    pytest.param(Parallel(), marks=pytest.mark.parity),
    pytest.param(Parallel(tp=2), marks=pytest.mark.parity),
    pytest.param(Parallel(cp=2, cp_order="zigzag", tp=2), marks=pytest.mark.parity),
    pytest.param(Parallel(ep=2, dp=2), marks=pytest.mark.parity),
    pytest.param(Parallel(tp=2, pp=2, dp=2), marks=pytest.mark.parity),
    pytest.param(Parallel(pp=2, vpp=2), marks=pytest.mark.parity),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_values_losses_and_gradients_are_those_of_one_rank(
    parallel: Parallel,
    ranks: RankPool,
    untied_folder: Path,
    experts_folder: Path,
    deep_folder: Path,
    of_one_rank: Callable[[Path], Any],
) -> None:
    folder = experts_folder if parallel.ep > 1 else deep_folder if parallel.vpp > 1 else untied_folder
    wanted = of_one_rank(folder)
    everywhere = ranks.run(parallel.world_size, measured, folder, parallel, jobs.GROUPS, SHIFT, {})
    columns = {key: values for found in everywhere for key, values in found["columns"].items()}
    assert columns.keys() == wanted["columns"].keys()
    for key, of_sample in wanted["columns"].items():
        for found, values in zip(columns[key], of_sample, strict=True):
            assert found == pytest.approx(values, abs=2e-6)
    for found in everywhere:
        if found["metrics"]:
            assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    gradients = {name: value for found in everywhere for name, value in found["gradients"].items()}
    assert gradients.keys() == wanted["gradients"].keys() and "head" in gradients
    for name, gradient in wanted["gradients"].items():
        scale = np.abs(gradient).max() + 1e-12
        assert np.abs(gradients[name] - gradient).max() / scale < 1e-5, name


def test_advantages_are_whitened_over_all_replicas_and_the_clip_binds_on_some_tokens(
    of_one_rank: Callable[[Path], Any], untied_folder: Path
) -> None:
    found = of_one_rank(untied_folder)
    assert found["loss"][1] > 0, "the clip binds"
    ids = [sample.token_ids.tobytes() for sample in jobs.make_samples("spans")]
    raw, returns = [], []
    for key, score in zip(ids, SCORES, strict=True):
        values = found["columns"][key][0].astype(np.float64)
        mine, following = np.zeros(len(values)), 0.0
        for token in range(len(values) - 1, -1, -1):
            is_last = token == len(values) - 1
            error = (score if is_last else 0.9 * values[token + 1]) - values[token]
            mine[token] = following = error + 0.9 * 0.8 * following
        raw.append(mine)
        returns.append(mine + values)
    joined = np.concatenate(raw)
    for key, mine, wanted in zip(ids, raw, returns, strict=True):
        _, of_returns, advantages = found["columns"][key]
        assert of_returns == pytest.approx(wanted, abs=1e-6)
        assert advantages == pytest.approx((mine - joined.mean()) / joined.std(ddof=1), abs=1e-5)
    explained = 1 - joined.var() / np.concatenate(returns).var()
    assert found["metrics"]["explained_variance"] == pytest.approx(explained, rel=1e-5)


def learned(rank: int, folder: Path, parallel: Parallel, settings: dict[str, Any]) -> list[dict[str, float]]:
    """Return the metrics of some steps of two updates each, and at the end the largest weight of the head."""
    critic = build_critic(folder, parallel, begins_at_zero=True, lr=3e-3, **settings)
    weights = [sum(len(s.sampled.weights) for s in jobs.make_samples(jobs.form_of(critic.engine)) if s.sampled)]
    found = []
    for _ in range(12):
        plan, minibatches = plan_and_samples(critic.engine, jobs.GROUPS, num_minibatches=2)
        metrics = critic.measure(plan, minibatches)
        for minibatch in minibatches:
            for tokens in (sample.sampled for micro in minibatch for sample in micro if sample.sampled):
                tokens.weights = np.full_like(tokens.weights, 1 / weights[0])
            assert not critic.step(minibatch, 1.0).was_skipped
        found.append(metrics)
    return [*found, {"head": max((float(head.abs().max()) for head in head_of(critic.engine)), default=0.0)}]


@pytest.mark.parametrize(
    ("parallel", "settings"),
    [
        (Parallel(pp=2), {"dtype": "bfloat16"}),
        pytest.param(Parallel(dp=2), {}, marks=pytest.mark.parity),
        pytest.param(Parallel(), {"freeze": ("language", "tower")}, marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_a_critic_begins_with_values_of_zero_and_learns_to_predict_rewards(
    parallel: Parallel, settings: dict[str, Any], ranks: RankPool, tied_folder: Path
) -> None:
    steps = ranks.run(parallel.world_size, learned, tied_folder, parallel, settings)[-1]
    assert steps[0]["value_mean"] == 0.0 and steps[0]["explained_variance"] == 0.0
    assert steps[-2]["explained_variance"] > 0.2
    assert steps[-1]["head"] > 0.0, "also where the rest of the language model is frozen"


def updates(policy: TrainEngine, critic: Critic, num: int) -> list[float]:
    """Return losses of updates of both, over all replicas."""
    losses = []
    for _ in range(num):
        plan, (minibatch,) = plan_and_samples(critic.engine, jobs.GROUPS)
        critic.measure(plan, [minibatch])
        for of_one in (policy.step(minibatch, jobs.weighted_loss), critic.step(minibatch, 1.0)):
            loss = of_one.loss_metrics.get("loss", 0.0) if policy.is_loss_rank else 0.0
            total = torch.tensor(loss, dtype=torch.float64)
            dist.all_reduce(total)
            losses.append(float(total))
    return losses


def both(folder: Path, parallel: Parallel) -> tuple[TrainEngine, Critic]:
    """Return the engine of a policy and a critic beside it."""
    policy = jobs.build_engine(folder, parallel, weight_decay=0.1)
    return policy, critic_beside(folder, parallel, begins_at_zero=False)


def save_and_go_on(rank: int, folder: Path, parallel: Parallel, directory: Path) -> list[float]:
    """Save both after two updates, and once the policy alone. Return the losses of two more updates."""
    policy, critic = both(folder, parallel)
    updates(policy, critic, 2)
    policy.save(directory / "both", asynchronous=True, beside=[critic.engine])
    losses = updates(policy, critic, 2)
    policy.finish_save()
    policy.save(directory / "policy")
    dist.barrier()
    return losses


def load_and_go_on(rank: int, folder: Path, parallel: Parallel, directory: Path) -> dict[str, Any]:
    """Return the losses of two updates after loading both, and the error of a checkpoint without a critic."""
    policy, critic = both(folder, parallel)
    for engine in (policy, critic.engine):
        engine.load(directory / "both")
    losses = updates(policy, critic, 2)
    try:
        critic.engine.load(directory / "policy")
    except CheckpointError as error:
        return {"losses": losses, "error": str(error)}
    return {"losses": losses, "error": ""}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Parallel(dp=2), Parallel(dp=2)),
        (Parallel(dp=2), Parallel(pp=2)),
        pytest.param(Parallel(tp=2, pp=2), Parallel(tp=2, pp=2), marks=pytest.mark.parity),
        pytest.param(Parallel(tp=2, pp=2), Parallel(cp=2), marks=pytest.mark.parity),
        pytest.param(Parallel(), Parallel(tp=2, sp=True), marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_a_critic_is_saved_beside_the_policy_and_goes_on_in_any_layout(
    first: Parallel, second: Parallel, ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    wanted = ranks.run(first.world_size, save_and_go_on, untied_folder, first, tmp_path)[0]
    found = ranks.run(second.world_size, load_and_go_on, untied_folder, second, tmp_path)[0]
    if first == second:
        assert found["losses"] == wanted
    else:
        assert found["losses"] == pytest.approx(wanted, rel=1e-5)
    assert "has no critic, because its run had another algorithm.name" in found["error"]
    assert len(set(wanted)) == len(wanted), "the updates change the losses"


def held(rank: int, folder: Path) -> list[int]:
    """Return the bytes of the critic that are on the device while the rank updates, and while it does not."""
    critic = build_critic(folder, Parallel())
    memory, found = critic.engine.memory, []
    for is_awake in (True, False, True):
        critic.hold(is_awake)
        found.append(sum(memory.resident_bytes(part) for part in Holding))
    return found


def test_a_critic_holds_nothing_while_no_update_is_made(ranks: RankPool, untied_folder: Path) -> None:
    awake, asleep, again = ranks.run(1, held, untied_folder)[0]
    assert awake == again > 0 and asleep == 0
