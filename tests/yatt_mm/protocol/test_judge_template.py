"""Tests of the text that a judge gets."""

from __future__ import annotations

import pytest

from yatt_mm.protocol.genrm import JudgeSpec
from yatt_mm.protocol.judge_template import JudgeTemplate


def test_question_response_answer_and_fields_are_filled_in_as_they_stand() -> None:
    template = JudgeTemplate("{question}|{response}|{answer}|{fields[hint]}|{{json}}")
    filled = template.fill(question="q", response="{answer}", answer="a", fields={"hint": 7})
    assert filled == "q|{answer}|a|7|{json}"


@pytest.mark.parametrize(
    "text", ["{response} {reply}", "{response} {fields[a].__class__}", "{response.text}", "{response} {0}"]
)
def test_a_place_that_there_is_not_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="the template names"):
        JudgeTemplate(text)


def test_a_judge_must_see_what_it_judges() -> None:
    with pytest.raises(ValueError, match=r"does not name \{response\}"):
        JudgeTemplate("{question}: right?")
    with pytest.raises(ValueError, match="cannot be read"):
        JudgeTemplate("{response} {")


def test_a_field_that_the_sample_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"wants fields\[hint\]; the sample has \['answer'\]"):
        JudgeTemplate("{response} {fields[hint]}").fill(question="", response="", answer="", fields={"answer": 1})


def test_several_votes_of_a_judge_that_always_says_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="num_votes is 3 with temperature 0"):
        JudgeSpec(name="judge", num_votes=3)
