"""Tests of the learning rate over a run, against numbers computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.training.learning_rate import learning_rate


def settings(**changes: Any) -> AdamSettings:
    return AdamSettings(**{"lr": 1.0, "weight_decay": 0.0, "betas": (0.9, 0.95), "clip_grad": 1.0} | changes)


def test_the_rate_rises_linearly_and_then_stays() -> None:
    rates = [settings(warmup_steps=4).lr_at(n) for n in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_rate_falls_linearly_to_its_final_share() -> None:
    falling = settings(warmup_steps=0, total_updates=5, lr_final_frac=0.2)
    assert [falling.lr_at(n) for n in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


HALF = math.sqrt(0.5)
"""The cosine of an eighth of a turn."""
BY_SCHEDULE: dict[str, tuple[dict[str, Any], list[float]]] = {
    "constant": ({"warmup_steps": 0}, [1.0] * 6),
    "constant_with_warmup": ({}, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
    "linear": ({}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
    "cosine": ({}, [0.0, 0.5, 1.0, (1 + HALF) / 2, 0.5, (1 - HALF) / 2]),
    "cosine_with_min_lr": (
        {"lr_final_frac": 0.2},
        [0.0, 0.5, 1.0, 0.2 + 0.8 * (1 + HALF) / 2, 0.6, 0.2 + 0.8 * (1 - HALF) / 2],
    ),
    "warmup_stable_decay": (
        {"lr_final_frac": 0.2, "decay_updates": 2, "warmup_steps": 2},
        [0.2, 0.6, 1.0, 1.0, 1.0, 0.6],  # it begins where it ends
    ),
}
"""Schedules of six updates, of which two are the warm-up, with the rates of the updates."""


@pytest.mark.parametrize("name", BY_SCHEDULE)
def test_a_named_schedule_has_the_hand_worked_rates(name: str) -> None:
    changes, wanted = BY_SCHEDULE[name]
    rate = learning_rate(settings(**{"schedule": name, "warmup_steps": 2, "total_updates": 6, "lr": 3.0, **changes}))
    assert [rate(number) for number in range(6)] == pytest.approx([3 * factor for factor in wanted])


def test_without_a_name_the_rate_is_what_it_always_was() -> None:
    plain = settings(warmup_steps=3, total_updates=7, lr_final_frac=0.1)
    assert [learning_rate(plain)(n) for n in range(7)] == [plain.lr_at(n) for n in range(7)]


def moved(rank: int, folder: Path, parallel: Parallel, changes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return how far the first update moves each tensor. AdamW's first step has the size of the learning rate."""
    engine = jobs.build_engine(folder, parallel, **changes)
    before = jobs.exported(engine)
    engine.step(jobs.microbatches(engine), jobs.weighted_loss)
    after = jobs.exported(engine)
    return {name: np.abs(after[name] - before[name]).max() for name in before}


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(),
        pytest.param(Parallel(dp=2), marks=pytest.mark.parity),
        pytest.param(Parallel(pp=2), marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_each_part_of_the_model_has_its_own_rate(parallel: Parallel, ranks: RankPool, untied_folder: Path) -> None:
    changes = {"lr": 1e-2, "part_lr": {"tower": 1e-3, "merger": 1e-4}}
    found = ranks.run(parallel.world_size, moved, untied_folder, parallel, changes)[0]
    wanted = {"merger": 1e-4, "tower": 1e-3, "language": 1e-2}
    for name, distance in found.items():
        part = "language" if not name.startswith("visual.") else "merger" if "merger" in name else "tower"
        assert distance == pytest.approx(wanted[part], rel=0.05), name
