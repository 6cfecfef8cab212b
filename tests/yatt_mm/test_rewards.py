"""Reward functions: found by name, right on examples, zero on what they cannot parse."""

from __future__ import annotations

import pytest

from yatt_mm.errors import ConfigError
from yatt_mm.rewards.functions import exact_match, regex_match
from yatt_mm.rewards.loading import load_reward_function


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
