"""Tests that a judge's text becomes a score."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from yatt_mm.protocol.genrm import JudgeSpec
from yatt_mm.protocol.verdicts import JsonScore, LabelScore, RegexScore, YesNo


def test_yes_against_no_is_the_share_of_their_probabilities() -> None:
    # 0.3 + 0.1 of yes against 0.1 of no, whatever else the judge might have said
    assert YesNo().score([math.log(0.3), math.log(0.1)], [math.log(0.1)]) == pytest.approx(0.8)
    assert YesNo().score([float("-inf")], [math.log(0.5)]) == 0.0


def test_a_judge_that_can_say_neither_gives_no_verdict() -> None:
    assert YesNo().score([float("-inf")], [float("-inf")]) is None


def test_a_threshold_cuts_the_mean_of_the_votes_and_leaves_failures_alone() -> None:
    spec = JudgeSpec(name="judge", threshold=0.5, score_on_failure=0.25)
    assert [spec.score_of(votes) for votes in ([0.98], [0.99], [0.5], [0.9, 0.0], [])] == [1.0, 1.0, 1.0, 0.0, 0.25]
    assert JudgeSpec(name="judge").score_of([0.9, 0.0]) == 0.45


def test_the_last_match_of_a_pattern_counts() -> None:
    verdict = RegexScore(pattern=r"score:\s*(\d+)", scale=10)
    assert verdict.score("score: 3 would be too low, so\nscore: 7") == 0.7


@pytest.mark.parametrize("text", ["", "no number", "score: 11", "score: "])
def test_what_cannot_be_read_by_a_pattern_is_no_verdict(text: str) -> None:
    assert RegexScore(pattern=r"score:\s*(\d*)", scale=10).score(text) is None


def test_the_last_json_object_counts_whatever_stands_around_it() -> None:
    text = 'First {"score": 1}, no: {"why": "a } in text", "score": 4} as I {said}'
    assert JsonScore(scale=5).score(text) == 0.8
    assert JsonScore(field="ok").score('{"ok": true}') == 1.0


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", '{"score": "high"}', '{"score": null}', '{"score": 9}', '{"score": NaN}', "[1]"),
        *(f'{{"score": 1{"0" * zeros}}}' for zeros in (400, 5000)),
    ],
)
def test_what_is_no_score_in_json_is_no_verdict(text: str) -> None:
    assert JsonScore(scale=5).score(text) is None


def test_a_pattern_without_its_one_group_is_refused() -> None:
    with pytest.raises(ValueError, match="has 0 groups; wanted one"):
        RegexScore(pattern=r"\d+")
    with pytest.raises(ValueError, match="not a regular expression"):
        RegexScore(pattern="(")
    with pytest.raises(ValueError, match="scale is 0"):
        JsonScore(scale=0)


def test_a_label_is_its_logit_or_a_probability() -> None:
    logits = (math.log(1.0), math.log(3.0))
    assert LabelScore(label=1).score((0.5, -7.25)) == -7.25
    assert LabelScore(label=1, activation="sigmoid").score(logits) == pytest.approx(0.75)
    assert LabelScore(label=1, activation="softmax").score(logits) == pytest.approx(0.75)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_a_sure_classifier_overflows_nowhere(activation: Literal["sigmoid", "softmax"]) -> None:
    verdict = LabelScore(activation=activation)
    assert [verdict.score((logit, 0.0)) for logit in (-1e4, 1e4)] == [0.0, 1.0]


def test_a_logit_that_is_no_number_is_no_verdict() -> None:
    assert LabelScore().score((float("nan"),)) is None
    assert LabelScore().score((float("inf"),)) is None
