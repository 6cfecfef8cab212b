"""Tests of the text that a judge gets."""

from __future__ import annotations

import pytest

from yatt_mm.common.conversation import Conversation, Part, Turn, ask
from yatt_mm.protocol.genrm import JudgeSpec
from yatt_mm.protocol.judge_template import CONVERSATION, JudgeTemplate


def test_question_response_answer_and_fields_are_filled_in_as_they_stand() -> None:
    template = JudgeTemplate("{question}|{response}|{answer}|{fields[hint]}|{{json}}")
    filled = template.fill(question=ask("q", ["image"]), response="{answer}", answer="a", fields={"hint": 7})
    assert filled == ask("q|{answer}|a|7|{json}", ["image"]), "media stay before the text"


INNER = Conversation((Turn("user", (Part("text", "Is "), Part("image"), Part("text", " it?"))),))


def test_media_inside_the_question_stay_inside_it_and_a_response_names_none() -> None:
    filled = JudgeTemplate("Q: {question} A: {response} Again: {question}").fill(
        question=INNER, response="<image>", answer="", fields={}
    )
    wanted = (Part("text", "Q: Is "), Part("image"), Part("text", " it? A: <image> Again: Is <image> it?"))
    assert filled == Conversation((Turn("user", wanted),))
    bare = JudgeTemplate("A: {response}").fill(question=INNER, response="7", answer="", fields={})
    assert bare == ask("A: 7", ["image"])


def test_media_of_a_system_turn_are_shown_and_its_text_is_not() -> None:
    system = Turn("system", (Part("text", "Like "), Part("video")))
    turns = Conversation((system, *ask("\n7?", ["image"]).turns))
    template = JudgeTemplate("{question} {response}")
    assert template.fill(question=turns, response="7", answer="", fields={}) == ask("7? 7", ["video", "image"])
    between = Conversation((*INNER.turns, system, *ask("7?").turns))
    read = template.fill(question=between, response="7", answer="", fields={})
    assert read.kinds == between.kinds == ("image", "video")
    assert [part.text for part in read.turns[0].parts] == ["user: Is ", "", " it?", "", "\n\nuser: 7? 7"]


def test_a_classifier_reads_the_questions_own_turns() -> None:
    turns = Conversation((Turn("system", (Part("text", "Be brief."),)), *INNER.turns))
    read = JudgeTemplate(CONVERSATION, needs_response=False).fill(question=turns, response="7", answer="", fields={})
    assert read == turns.answered("7")


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
        JudgeTemplate("{response} {fields[hint]}").fill(question=ask(""), response="", answer="", fields={"answer": 1})


def test_several_votes_of_a_judge_that_always_says_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="num_votes is 3 with temperature 0"):
        JudgeSpec(name="judge", num_votes=3)
