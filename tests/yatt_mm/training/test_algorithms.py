"""Tests that losses that look at whole responses do not depend on how the model and the samples are divided."""

from __future__ import annotations

import dataclasses
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
from tests.yatt_mm.training.tiny import make_samples
from yatt_mm.algorithms.losses import policy_loss
from yatt_mm.algorithms.settings import AlgorithmSettings, CorrectionSettings
from yatt_mm.algorithms.table import ALGORITHMS
from yatt_mm.training.megatron_engine import TrainEngine
from yatt_mm.training.train_sample import SampledTokens, TrainSample

CASES = {
    "grpo": AlgorithmSettings(
        name="grpo",
        dual_clip=1.1,
        entropy_coef=0.1,
        correction=CorrectionSettings(kind="icepop", level="geometric", floor=0.8, cap=1.05, worst_ratio=2.0),
    ),
    "gspo": AlgorithmSettings(
        name="gspo", clip_low=0.02, clip_high=0.02, correction=CorrectionSettings(kind="tis", level="sequence", cap=1.5)
    ),
    "cispo": AlgorithmSettings(name="cispo", clip_high=0.1, correction=CorrectionSettings(kind="tis", cap=1.2)),
}
"""Every surrogate, and every level of the correction, with bounds that bind on some of the tokens."""
Columns = list[dict[str, np.ndarray]]
"""[sample] the columns of its sampled tokens."""
Found = dict[str, tuple[dict[str, float], dict[str, np.ndarray]]]
"""By case the metrics, and the gradients of the whole model by name."""


def reference_logprobs(rank: int, folder: Path) -> list[np.ndarray]:
    """Return [sample] the log-probabilities of the samples' sampled tokens."""
    engine = jobs.build_engine(folder, Parallel())
    return engine.logprobs([make_samples(jobs.form_of(engine))])[0]


def losses_and_gradients(
    rank: int, folder: Path, parallel: Parallel, columns: Columns, groups: Sequence[Sequence[int]]
) -> Found:
    """Return the metrics of all replicas and the full gradients in each case, before any update."""
    found = {}
    for name, settings in CASES.items():
        engine = jobs.build_engine(folder, parallel)
        jobs.zero_gradients(engine)
        loss = functools.partial(policy_loss, surrogate=ALGORITHMS[name].surrogate, settings=settings)
        scored = engine._run(_with_columns(engine, columns, groups), 1.0, loss)
        names = ("loss", "entropy", "clip_frac", "approx_kl", "mismatch_k3", "cut_frac", "correction_mean")
        sums = [sum(float(part.metrics.get(key, 0.0)) for part in scored) * engine.is_loss_rank for key in names]
        total = torch.tensor(sums, dtype=torch.float64)
        dist.all_reduce(total)
        found[name] = (dict(zip(names, total.tolist(), strict=True)), jobs.gradients(engine))
    return found


def _with_columns(engine: TrainEngine, columns: Columns, groups: Sequence[Sequence[int]]) -> list[list[TrainSample]]:
    """Return this replica's microbatches, whose sampled tokens have these columns."""
    samples = make_samples(jobs.form_of(engine))
    place = {sample.token_ids.tobytes(): number for number, sample in enumerate(samples)}

    def tokens(sample: TrainSample) -> SampledTokens:
        mine = columns[place[sample.token_ids.tobytes()]]
        found = SampledTokens(
            weights=mine["weights"],
            advantages=mine["advantages"],
            rollout_logprobs=mine["rollout_logprobs"],
            is_stale=np.zeros(len(mine["weights"]), dtype=bool),
            is_corrected=True,
        )
        found.measure(mine["old_logprobs"])
        return found

    return [
        [dataclasses.replace(sample, sampled=tokens(sample)) for sample in micro]
        for micro in jobs.microbatches(engine, groups)
    ]


def columns_of(logprobs: Sequence[np.ndarray]) -> Columns:
    """Return columns in which the old policy and the engine are near the policy with these log-probabilities."""
    random = np.random.default_rng(5)
    num_tokens = sum(map(len, logprobs))

    def near(values: np.ndarray) -> np.ndarray:
        return (values + random.normal(0, 0.15, len(values))).astype(np.float32)

    found = []
    for values in logprobs:
        old = near(values)
        found.append(
            {
                "weights": np.full(len(values), 1 / num_tokens, dtype=np.float32),
                "advantages": np.full(len(values), random.normal(), dtype=np.float32),
                "old_logprobs": old,
                "rollout_logprobs": near(old),
            }
        )
    return found


@pytest.fixture(scope="module")
def known(ranks: RankPool) -> Callable[[Path], tuple[Columns, Found]]:
    """Return for a folder the columns, and what one rank finds for them with all samples in one microbatch."""

    @functools.cache
    def of_folder(folder: Path) -> tuple[Columns, Found]:
        columns = columns_of(ranks.run(1, reference_logprobs, folder)[0])
        return columns, ranks.run(1, losses_and_gradients, folder, Parallel(), columns, (range(8),))[0]

    return of_folder


LAYOUTS: list[Any] = [
    Parallel(cp=2),
    pytest.param(Parallel(), marks=pytest.mark.parity),
    pytest.param(Parallel(tp=2), marks=pytest.mark.parity),
    pytest.param(Parallel(pp=2), marks=pytest.mark.parity),
    pytest.param(Parallel(dp=2), marks=pytest.mark.parity),
    pytest.param(Parallel(cp=2, cp_order="zigzag", tp=2), marks=pytest.mark.parity),
    pytest.param(Parallel(ep=2, dp=2), marks=pytest.mark.parity),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_losses_and_gradients_are_those_of_one_rank(
    parallel: Parallel, ranks: RankPool, untied_folder: Path, experts_folder: Path, known: Callable[[Path], Any]
) -> None:
    folder = experts_folder if parallel.ep > 1 else untied_folder
    columns, wanted = known(folder)
    found = ranks.run(parallel.world_size, losses_and_gradients, folder, parallel, columns, jobs.GROUPS)[0]
    for name, (metrics, gradients) in wanted.items():
        assert found[name][0] == pytest.approx(metrics, rel=1e-5, abs=1e-6), name
        for key in ("clip_frac", "cut_frac"):
            assert 0 < metrics[key] < 1, f"the bounds of {name} bind on some tokens: {key}"
        for key, gradient in gradients.items():
            scale = np.abs(gradient).max() + 1e-12
            assert np.abs(found[name][1][key] - gradient).max() / scale < 1e-5, (name, key)
