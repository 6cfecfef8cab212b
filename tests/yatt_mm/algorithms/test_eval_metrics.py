"""Tests of what evaluations measure, with numbers worked out by hand."""

from __future__ import annotations

from itertools import combinations
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yatt_mm.algorithms.eval_metrics import maj_at, measure, pass_at


@pytest.mark.parametrize(
    ("k", "scores", "wanted"),
    [
        (1, [1, 0, 0, 0], 0.25),  # 1 of 4
        (2, [1, 0, 0, 0], 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (2, [1, 1, 0, 0], 5 / 6),  # 1 - C(2, 2) / C(4, 2) = 1 - 1 / 6
        (3, [1, 1, 0, 0], 1.0),  # there are only 2 wrong ones
        (4, [0, 0, 0, 0], 0.0),
        (1, [0.5, 0.49], 0.5),  # right from 0.5 on
    ],
)
def test_pass_at_k(k: int, scores: list[float], wanted: float) -> None:
    assert pass_at(k, scores) == pytest.approx(wanted)


@given(scores=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7), k=st.integers(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(scores: list[float], k: int) -> None:
    k = min(k, len(scores))
    draws = [any(drawn) for drawn in combinations(scores, k)]
    assert isclose(pass_at(k, scores), sum(draws) / len(draws))


@pytest.mark.parametrize(
    ("k", "scores", "answers", "wanted"),
    [
        (3, [1, 0, 0], ["7", "8", "8"], 0.0),  # 8 has two votes, and is wrong
        (3, [0, 1, 1], ["8", "7", "7"], 1.0),
        (3, [1, 0, 1], ["7", "8", "7"], 1.0),
        (2, [1, 0, 0], ["7", "8", "8"], 1.0),  # one vote each: the first counts
        (4, [0, 1, 1, 0], ["8", "7", "7", "8"], 0.0),  # two votes each: 8 is given first
        (1, [0, 1, 1], ["8", "7", "7"], 0.0),
    ],
)
def test_maj_at_k(k: int, scores: list[float], answers: list[str], wanted: float) -> None:
    assert maj_at(k, scores, answers) == wanted


def test_metrics_are_named_with_their_k() -> None:
    scores, answers = [1.0, 0.0, 0.5, 0.0], ["7", "8", "7", "8"]
    assert measure("mean@4", scores, answers) == 0.375
    assert measure("mean@3", scores, answers) == 0.5
    assert measure("pass@2", scores, answers) == pytest.approx(5 / 6)
    assert measure("maj@4", scores, answers) == 1.0
