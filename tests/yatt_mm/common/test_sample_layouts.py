"""Tests of layouts: which one a sample has, what its question and answer are, and what is said of unknown ones."""

from __future__ import annotations

from typing import Any

import pytest

from yatt_mm.common.sample_layouts import EXACT_MATCH, LAYOUTS, MATHEMATICS, find_layout

ASKED = [{"role": "user", "content": "What?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "7"}]}]
SHARED = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "7"}]


@pytest.mark.parametrize(
    ("fields", "name", "question", "answer", "reward"),
    [
        ({"question": "What?", "answer": 7}, "question and answer", "What?", "7", EXACT_MATCH),
        ({"question": "What?", "answer": "7", "messages": ANSWERED}, "question and answer", "What?", "7", EXACT_MATCH),
        ({"prompt": ASKED, "reward_model": {"ground_truth": "7"}}, "verl", ASKED, "7", MATHEMATICS),
        ({"problem": "What?", "answer": "7"}, "EasyR1", "What?", "7", MATHEMATICS),
        ({"problem": "What?", "solution": "7"}, "Open-R1", "What?", "7", MATHEMATICS),
        ({"prompt": ASKED, "solution": "7"}, "TRL", ASKED, "7", MATHEMATICS),
        ({"prompt": "What?", "answer": "7"}, "prompt and answer", "What?", "7", EXACT_MATCH),
        ({"messages": ASKED, "solution": "7"}, "ms-swift", ASKED, "7", MATHEMATICS),
        ({"messages": ANSWERED, "solution": "8"}, "ms-swift", ASKED, "8", MATHEMATICS),
        ({"messages": ANSWERED}, "OpenAI messages", ASKED, "7", EXACT_MATCH),
        ({"messages": [*ANSWERED, *ASKED, *ANSWERED[1:]]}, "OpenAI messages", [*ANSWERED, *ASKED], "7", EXACT_MATCH),
        ({"conversations": SHARED}, "LLaVA or ShareGPT", SHARED[:1], "7", EXACT_MATCH),
        (
            {"conversations": SHARED, "system": "Be brief."},
            "LLaVA or ShareGPT",
            [{"role": "system", "content": "Be brief."}, *SHARED[:1]],
            "7",
            EXACT_MATCH,
        ),
        (
            {"query": "What?", "response": "7", "history": [["Hi", "Hello"]], "system": "Be brief."},
            "ms-swift",
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                *ASKED,
            ],
            "7",
            EXACT_MATCH,
        ),
        ({"txt": "What?", "cls": 7}, "WebDataset", "What?", "7", EXACT_MATCH),
        ({"cls": 7, "id": "a"}, "WebDataset", "", "7", EXACT_MATCH),
        ({"txt": "a cat"}, "WebDataset", "", "a cat", EXACT_MATCH),
    ],
)
def test_the_layout_of_a_sample_says_where_question_and_answer_are(
    fields: dict[str, Any], name: str, question: Any, answer: str, reward: str
) -> None:
    layout = find_layout(fields)
    assert (layout.name, layout.reward) == (name, reward)
    assert (layout.question_of(fields), layout.answer_of(fields)) == (question, answer)


@pytest.mark.parametrize(
    ("fields", "nearest"),
    [
        ({"problem": "x", "level": 3}, "EasyR1 .question: problem, answer: answer., of which answer is missing"),
        ({"prompt": "x", "reward_model": {}}, "verl .*, of which reward_model.ground_truth is missing"),
        ({"messages": ASKED}, "ms-swift .question: messages, answer: solution., of which solution is missing"),
        ({"conversations": SHARED[:1]}, "LLaVA .*, of which a turn of the assistant at the end of conversations is"),
        ({"text": "x"}, "its samples have text, which is no known layout .question and answer, verl, EasyR1, "),
        ({}, "its samples have no fields"),
    ],
)
def test_an_unknown_layout_is_told_with_the_nearest_one(fields: dict[str, Any], nearest: str) -> None:
    with pytest.raises(ValueError, match=nearest):
        find_layout(fields)


def test_fields_that_are_named_count_and_the_layout_gives_the_others() -> None:
    verl = {"prompt": ASKED, "reward_model": {"ground_truth": "7"}, "extra_info": {"answer": "seven"}}
    assert find_layout(verl, question="prompt").answer_of(verl) == "7"
    named = find_layout(verl, answer="extra_info.answer")
    assert (named.question_of(verl), named.answer_of(verl), named.reward) == (ASKED, "seven", EXACT_MATCH)
    other = find_layout({"text": "What?", "answer": "7"}, question="text")
    assert (other.question, other.answer, other.is_cut) == ("text", "answer", False)
    spoken = find_layout({"messages": ANSWERED, "label": "8"}, answer="label")
    assert spoken.question_of({"messages": ANSWERED}) == ASKED


def test_every_layout_has_words_of_its_own() -> None:
    assert len(set(map(str, LAYOUTS))) == len(LAYOUTS)


def test_a_system_turn_is_not_said_twice_and_a_history_of_no_pairs_is_told() -> None:
    spoken = {"messages": [{"role": "system", "content": "Own."}, *ANSWERED], "system": "Be brief."}
    assert find_layout(spoken).question_of(spoken) == spoken["messages"][:-1]
    with pytest.raises(ValueError, match="wanted pairs of question and answer"):
        find_layout({"query": "x", "response": "y"}).question_of({"query": "x", "history": [1, 2]})


@pytest.mark.parametrize("turns", [ASKED, [], "text", [{"role": "user"}, "text"]])
def test_a_conversation_without_an_answer_is_told(turns: Any) -> None:
    layout = find_layout({"messages": ANSWERED})
    with pytest.raises(ValueError, match=r"the last turn of messages is .*; wanted one of the assistant"):
        layout.answer_of({"messages": turns})
