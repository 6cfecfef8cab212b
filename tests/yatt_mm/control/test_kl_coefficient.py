"""Tests of the weight of the divergence in the rewards: it follows the records, and goes on after a break."""

from __future__ import annotations

import pytest

from yatt_mm.algorithms.settings import KlSettings
from yatt_mm.control.kl_coefficient import KlCoefficient

FIXED = KlSettings(where="reward", coef=0.5)
MOVED = KlSettings(where="reward", coef=0.5, target=0.1)


def test_without_a_target_it_stays_and_no_checkpoint_has_it() -> None:
    kl = KlCoefficient(FIXED, 0.25)
    assert kl.take({"train/kl": 9.0}) == {}
    assert (kl.value, kl.state) == (0.5, None)


def test_a_record_has_the_weight_of_its_step_and_the_next_one_another() -> None:
    kl = KlCoefficient(MOVED)
    assert kl.take({"eval/accuracy": 0.5}) == {}, "the model of the start"
    assert kl.take({"train/kl": 9.0}) == {"train/kl_coef": 0.5}
    assert kl.take({"train/kl": 0.0}) == {"train/kl_coef": pytest.approx(0.5 * 1.02)}
    assert kl.value == kl.state == pytest.approx(0.5 * 1.02 * 0.98)


def test_a_run_that_goes_on_has_the_weight_of_before() -> None:
    kl = KlCoefficient(MOVED)
    kl.take({"train/kl": 9.0})
    assert KlCoefficient(MOVED, kl.state).value == kl.value
