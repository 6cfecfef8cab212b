"""Tests of the learning rate over a run, against numbers computed by hand."""

import pytest

from yatt_mm.protocol.adam_settings import AdamSettings


def settings(**changes: float) -> AdamSettings:
    return AdamSettings(**{"lr": 1.0, "weight_decay": 0.0, "betas": (0.9, 0.95), "clip_grad": 1.0} | changes)  # type: ignore[arg-type]


def test_the_rate_rises_linearly_and_then_stays() -> None:
    rates = [settings(warmup_steps=4).lr_at(n) for n in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_rate_falls_linearly_to_its_final_share() -> None:
    falling = settings(warmup_steps=0, total_updates=5, lr_final_frac=0.2)
    assert [falling.lr_at(n) for n in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
