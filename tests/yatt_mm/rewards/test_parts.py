"""Tests of rewards that have parts with names: what they make together, and what is kept of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.yatt_mm.rewards.test_forms import call
from yatt_mm.rewards.reading import Reward, read_reward


@pytest.mark.parametrize(
    ("given", "weights", "reward"),
    [
        (True, {}, Reward(value=1.0)),
        (np.float32(0.5), {}, Reward(value=0.5)),
        ({"accuracy": 1, "format": 0.5}, {}, Reward(value=1.5, parts={"accuracy": 1.0, "format": 0.5})),
        ({"accuracy": 1, "format": 1}, {"format": 0.1}, Reward(value=1.1, parts={"accuracy": 1.0, "format": 1.0})),
        ({"overall": 0.9, "accuracy": 1}, {"accuracy": 5}, Reward(value=0.9, parts={"accuracy": 1.0})),
        ({"accuracy": 1, "answer": 7}, {}, Reward(value=1.0, parts={"accuracy": 1.0}, answer="7")),
        # verl's DAPO
        ({"score": -1.0, "acc": False, "pred": "x^2"}, {}, Reward(value=-1.0, parts={"acc": 0.0}, answer="x^2")),
        ({"score": 1.0, "acc": True, "pred": None, "note": "x"}, {}, Reward(value=1.0, parts={"acc": 1.0})),
    ],
)
def test_parts_are_weighted_and_kept(given: Any, weights: dict[str, float], reward: Reward) -> None:
    assert read_reward(given, weights) == reward


RANGES = {"length": (-1.0, 0.0), "score": (0.0, 1.0)}


@pytest.mark.parametrize(
    ("given", "value", "parts"),
    [
        ({"right": 1, "length": -4}, 1.0 - 0.5, {"right": 1.0, "length": -4.0}),
        ({"right": 1, "length": -0.5}, 1.0 - 0.25, {"right": 1.0, "length": -0.5}),
        ({"right": 7, "length": 3}, 7.0, {"right": 7.0, "length": 3.0}),
        ({"score": 1.5, "acc": 1}, 1.0, {"acc": 1.0}),
        ({"score": -2.0}, 0.0, {}),
    ],
)
def test_a_part_counts_within_its_range_before_its_weight_and_is_kept_as_it_was(
    given: dict[str, float], value: float, parts: dict[str, float]
) -> None:
    assert read_reward(given, {"length": 0.5}, RANGES) == Reward(value=value, parts=parts)


@pytest.mark.parametrize(
    "given", [{"answer": "7"}, {}, {"accuracy": "high"}, {"accuracy": float("inf")}, "7 of 9", None]
)
def test_what_has_no_number_is_no_reward(given: Any) -> None:
    with pytest.raises(ValueError, match=r"it returned .*; wanted a finite number, or a dictionary of finite numbers"):
        read_reward(given, {})


def test_a_call_bounds_and_weighs_the_parts_that_the_function_returns() -> None:
    def score(response: str, answer: str, fields: dict[str, Any]) -> dict[str, float]:
        return {"right": 1, "length": -4}

    def batch(responses: list[str], answers: list[str], fields: Any) -> list[dict[str, float]]:
        return [score(*one) for one in zip(responses, answers, fields)]

    wanted = Reward(value=1.0 - 0.5, parts={"right": 1.0, "length": -4.0})
    for function in (score, batch):
        given = call(function, "a", weights={"length": 0.5}, ranges={"length": (-1.0, 0.0)})
        assert given == [wanted], function.__name__
