"""Tests of reward functions: they are found by name, right on examples, and 0 on text that they cannot parse."""

from __future__ import annotations

import numpy as np
import pytest

from yatt_mm.common.errors import ConfigError
from yatt_mm.protocol.group_record import GroupRecord, SampleRecord
from yatt_mm.protocol.rewards import GroupRewards, RewardTask
from yatt_mm.rewards.functions import exact_match, regex_match
from yatt_mm.rewards.loading import load_reward_function
from yatt_mm.rewards.worker import RewardWorker


def test_exact_match_ignores_white_space_only() -> None:
    assert exact_match(" 7\n", "7", {}) == 1.0
    assert exact_match("7.", "7", {}) == 0.0
    assert exact_match("", "7", {}) == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "fields", "reward"),
    [
        ("It is 12, no, 42.", "42", {}, 1.0),
        ("no number here", "42", {}, 0.0),
        ("<answer>cat</answer>", "cat", {"pattern": r"<answer>(.*?)</answer>"}, 1.0),
        ("<answer>cat", "cat", {"pattern": r"<answer>(.*?)</answer>"}, 0.0),
    ],
)
def test_regex_match_takes_the_last_match(response: str, answer: str, fields: dict, reward: float) -> None:
    assert regex_match(response, answer, fields) == reward


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("exact_match", "wanted module:name"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("yatt_mm.rewards.functions:nope", r"has no function nope; it has \['exact_match', 'regex_match'\]"),
        ("math:sqrt", "must take"),
    ],
)
def test_a_reward_function_that_cannot_be_used_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward_function(path)


def score(function: str, *texts: str, deadline_s: float = 5.0) -> GroupRewards:
    """Return a worker's rewards of one group, without a data plane."""
    worker = object.__new__(RewardWorker)
    worker._name, worker._function, worker._deadline_s = function, load_reward_function(function), deadline_s
    samples = tuple(
        SampleRecord(
            token_ids=np.zeros(1),
            logprobs=np.zeros(1),
            policy_versions=np.zeros(1),
            text=text,
            finish_reason="stop",
        )
        for text in texts
    )
    task = RewardTask(group=None, answer="7", fields={})  # type: ignore[arg-type]
    return worker._score_group(task, GroupRecord(prompt_token_ids=np.zeros(1), samples=samples))


def test_what_a_reward_function_cannot_judge_scores_zero_and_is_counted() -> None:
    got = score("tests.yatt_mm.any_reward:even_length", "ab", "", "abc")
    assert got == GroupRewards(rewards=(1.0, 0.0, 0.0), num_errors=1)


def test_a_reward_that_is_no_finite_number_scores_zero_and_is_counted() -> None:
    assert score("tests.yatt_mm.any_reward:not_a_number", "7") == GroupRewards(rewards=(0.0,), num_errors=1)


def test_a_reward_function_that_hangs_is_interrupted() -> None:
    assert score("tests.yatt_mm.any_reward:endless", "7", deadline_s=0.2).num_errors == 1
