"""Tests that neither the loss nor a gradient depends on how samples are distributed, packed and cut into
microbatches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.balance import plan_for
from benchmarks.common.published_lengths import Prompt, draw, to_samples
from models.compat.megatron_core import parallel_state
from models.flops import count_operations
from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import IMAGE_TOKEN, PATCH_VALUES, VOCAB_SIZE
from yatt_mm.training.microbatches import Limits

Plan = list[list[list[tuple[int, int]]]]
"""The samples of each [replica][microbatch], as pairs (prompt, row)."""
WHOLE, SMALL = Limits(max_tokens=10_000), Limits(max_tokens=240, max_patches=240, multiple_of=2)
PROMPTS = draw(5, 4, shrink=24, seed=3)
PLANS = {
    "alone": ("round_robin", 1, WHOLE),
    "alone, small microbatches": ("ours", 1, SMALL),
    "two replicas": ("ours", 2, WHOLE),
    "two replicas, small microbatches": ("ours", 2, SMALL),
    "two replicas, groups torn": ("round_robin", 2, SMALL),
    "two replicas, verl's formula": ("verl", 2, SMALL),
}
"""The plans by name: how samples are distributed over how many replicas, and what a microbatch holds."""


def losses_and_gradients(
    rank: int, folder: Path, prompts: list[Prompt], plans: dict[str, Plan], dp: int
) -> dict[str, tuple[float, dict[str, np.ndarray]]]:
    """Return the global loss and full gradients under each plan, before any update."""
    groups = [
        to_samples(prompt, image_token=IMAGE_TOKEN, vocab_size=VOCAB_SIZE, patch_values=PATCH_VALUES)
        for prompt in prompts
    ]
    found = {}
    for name, plan in plans.items():
        engine = jobs.build_engine(folder, Parallel(dp=dp))
        jobs.zero_gradients(engine)
        mine = plan[parallel_state.get_data_parallel_rank()]
        scored = engine._run([[groups[p][row] for p, row in micro] for micro in mine], 1.0, jobs.weighted_loss)
        loss = torch.tensor([sum(float(part.metrics.get("loss", 0.0)) for part in scored)], dtype=torch.float64)
        dist.all_reduce(loss)
        found[name] = (float(loss), jobs.gradients(engine))
    return found


def plan_named(name: str, config: dict) -> Plan:
    path, num_replicas, limits = PLANS[name]
    plan = plan_for(path, PROMPTS, count_operations(config), num_replicas, limits)
    return [
        [[(p.group.position, row) for p in micro for row in p.rows] for micro in microbatches] for microbatches in plan
    ]


def test_loss_and_gradients_do_not_depend_on_the_plan(ranks: RankPool, untied_folder: Path) -> None:
    config = json.loads((untied_folder / "config.json").read_text())
    plans = {name: plan_named(name, config) for name in PLANS}
    found: dict[str, tuple[float, dict[str, np.ndarray]]] = {}
    for dp in (1, 2):
        chosen = {name: plan for name, plan in plans.items() if len(plan) == dp}
        found |= ranks.run(dp, losses_and_gradients, untied_folder, PROMPTS, chosen, dp)[0]
    assert len({str(plan) for plan in plans.values()}) == len(plans), "the plans differ"
    loss, gradients = found.pop("alone")
    for name, (other_loss, other) in found.items():
        assert other_loss == pytest.approx(loss, rel=1e-6), name
        difference = np.array([np.linalg.norm(other[key] - gradients[key]) for key in gradients])
        norms = np.array([np.linalg.norm(gradients[key]) for key in gradients])
        assert np.linalg.norm(difference) < 1e-6 * np.linalg.norm(norms), name
        assert (difference < 5e-6 * norms).all(), (name, list(gradients)[int(np.argmax(difference / norms))])
