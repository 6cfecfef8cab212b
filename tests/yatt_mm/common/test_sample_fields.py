"""Tests of how answers become text."""

from __future__ import annotations

import pytest

from yatt_mm.common.sample_fields import read_answer


@pytest.mark.parametrize(
    ("value", "text"),
    [("7", "7"), ("", ""), (7, "7"), (7.5, "7.5"), (True, "true"), (["é", 1], '["é", 1]'), ({"a": 1}, '{"a": 1}')],
)
def test_text_stays_as_it_is_and_anything_else_is_json(value: object, text: str) -> None:
    assert read_answer(value, "answer") == text


def test_null_is_no_answer() -> None:
    with pytest.raises(ValueError, match=r"the sample's reward_model.ground_truth is null; give it an answer"):
        read_answer(None, "reward_model.ground_truth")
