"""Tests of which model of a run is the best so far."""

from __future__ import annotations

from yatt_mm.control.best_model import BestModel
from yatt_mm.protocol.control import Best

METRIC = "eval/scans/pass@4"


def test_only_a_higher_value_of_a_later_step_is_better() -> None:
    best = BestModel(METRIC)
    assert not best.take(0, {METRIC: 0.5}) and best.step is None, "the model of the start is there already"
    assert [best.take(step, {METRIC: value}) for step, value in ((1, 0.4), (2, 0.5), (3, 0.6), (4, 0.6))] == [
        False,
        False,
        True,
        False,
    ]
    assert not best.take(5, {"eval/accuracy": 0.9}), "a step without an evaluation of the set"
    assert (best.step, best.state()) == (3, {"step": 3, "value": 0.6})
    assert best.metrics() == {"best/step": 3, "best/value": 0.6}


def test_a_run_that_is_resumed_compares_with_what_it_had() -> None:
    best = BestModel(METRIC, Best(step=3, value=0.6))
    assert not best.take(4, {METRIC: 0.55}) and best.step == 3
    assert best.take(5, {METRIC: 0.65}) and best.step == 5


def test_without_a_metric_nothing_is_looked_for() -> None:
    best = BestModel(None)
    assert not best.take(1, {METRIC: 0.5})
    assert (best.step, best.state(), best.metrics()) == (None, None, {})
