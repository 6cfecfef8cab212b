"""Tests of the project's reward functions, on cases from where they come from and on texts that they cannot parse."""

from __future__ import annotations

from typing import Any

import pytest

from yatt_mm.rewards.boxes import find_boxes, mean_iou
from yatt_mm.rewards.functions import (
    anls,
    box_iou,
    choice_letter,
    edit_similarity,
    exact_match,
    mathematics,
    number,
    point_in_box,
    regex_match,
    soft_overlong,
    think_format,
)


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
    ("response", "answer", "reward"),
    [
        # of the tests of Open-R1 and TRL
        (r"\boxed{\frac{63}{400}}", r"\frac{63}{400}", 1.0),
        (r"\boxed{\frac{64}{400}}", r"\frac{63}{400}", 0.0),
        (r"\boxed{\frac{63}{400}}", "63/400", 1.0),
        # of math-verify's README
        (r"${1,3} \\cup {2,4}$", "${1,2,3,4}$", 1.0),
        ("Let's solve: 1/2 + 1/3 is $5/6$.", r"$\\frac{5}{6}$", 1.0),
        # of verl's and EasyR1's sets: geometry3k, gsm8k, MATH
        (r"<think>3-4-5</think> \boxed{2\sqrt{13}}", r"\sqrt{52}", 1.0),
        (r"first \boxed{3}, no, \boxed{ 4 }", "4", 1.0),
        (r"first \boxed{4}, no, \boxed{3}", "4", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{12\text{ cm}}", "12", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{(1, 2)}", "[1, 2)", 0.0),
        ("so 42.", "42", 1.0),
        ("so 42.", "43", 0.0),
        # of Open-R1's: tags around both
        ("<think>2 + 1</think><answer> 3 </answer>", "<answer> 3 </answer>", 1.0),
        ("<answer>3</answer>", "<answer> .3 </answer>", 0.0),
        (r"<answer>\boxed{B}</answer>", "B", 1.0),
        ("(b).", "B", 1.0),
        (r"\boxed{\text{A}}", "B", 0.0),
        (r"\boxed{", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_mathematics_compares_what_answers_mean(response: str, answer: str, reward: float) -> None:
    assert mathematics(response.replace(r"\\", "\\"), answer.replace(r"\\", "\\"), {}) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        # of MMMU's parser: letters in brackets, letters alone, the last one of several
        ("The answer is (B).", "B", 1.0),
        ("B", "B", 1.0),
        ("(A) is wrong, so it is (C)", "C", 1.0),
        ("I would choose B", "B", 1.0),
        ("A. a cat", "A", 1.0),
        ("B: 12 apples", "(B)", 1.0),
        ("A, B and C are wrong. The answer is D.", "D", 1.0),
        # of XLRS in lmms-eval: the last explicit answer counts
        ("Reasoning mentions A and C. Final Answer: B", "B", 1.0),
        ("The result is unclear", "A", 0.0),
        # answers in tags and boxes
        ("<think>A or B?</think><answer>B</answer>", "B", 1.0),
        (r"\boxed{\text{D}}", "D. a dog", 1.0),
        ("the correct option is: **D**", "D", 1.0),
        ("A dog sits there", "A", 0.0),
        ("I'm not sure", "I", 0.0),
        ("b", "B", 0.0),
        ("", "A", 0.0),
    ],
)
def test_choice_letter_reads_the_letter_that_is_chosen(response: str, answer: str, reward: float) -> None:
    assert choice_letter(response, answer, {}) == reward


@pytest.mark.parametrize(
    ("response", "answer", "fields", "reward"),
    [
        # ChartQA's relaxed accuracy: within 5 %, a percentage is a hundredth, the same text otherwise
        ("42", "42", {}, 1.0),
        ("102", "100", {}, 1.0),
        ("106", "100", {}, 0.0),
        ("12%", "0.12", {}, 1.0),
        ("45%", "45", {}, 0.0),
        ("Yes", "yes", {}, 1.0),
        ("no", "yes", {}, 0.0),
        # unlike ChartQA's, it finds the number in a sentence
        ("It is 1,234.5 in all.", "1234.5", {}, 1.0),
        ("<answer>12</answer> of 40", "12", {}, 1.0),
        ("102", "100", {"tolerance": 0.01}, 0.0),
        ("0", "0", {}, 1.0),
        ("0.001", "0", {}, 0.0),
        ("-3", "3", {}, 0.0),
        ("$1.2e3", "1200", {}, 1.0),
        ("many", "3", {}, 0.0),
        ("Group 7 has 1", "Group 1", {}, 0.0),
        ("group 1", "Group 1", {}, 1.0),
        ("104", "100", {"tolerance": None}, 1.0),
    ],
)
def test_number_allows_five_percent(response: str, answer: str, fields: dict[str, Any], reward: float) -> None:
    assert number(response, answer, fields) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("[0, 0, 10, 10]", "[0, 0, 10, 10]", 1.0),
        ("<answer>[5, 0, 15, 10]</answer>", "[0, 0, 10, 10]", 1 / 3),
        ("(0,0),(10,10)", "[5, 0, 15, 10]", 1 / 3),
        ('```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "a"}]\n```', "[[0, 0, 10, 10]]", 1.0),
        ("[0, 0, 10, 10]", "[[0, 0, 10, 10], [20, 20, 30, 30]]", 0.5),
        ("[20, 20, 30, 30] and [0, 0, 10, 10]", "[[0, 0, 10, 10], [20, 20, 30, 30]]", 1.0),
        ("[0, 0, 10, 10] [0, 0, 10, 10]", "[0, 0, 10, 10]", 0.5),
        ("[10, 10, 0, 0]", "[0, 0, 10, 10]", 1.0),
        ("[50, 50, 60, 60]", "[0, 0, 10, 10]", 0.0),
        ("no box", "[0, 0, 10, 10]", 0.0),
        ("[0, 0, 0, 0]", "[0, 0, 0, 0]", 0.0),
    ],
)
def test_box_iou_matches_boxes_by_what_they_share(response: str, answer: str, reward: float) -> None:
    assert box_iou(response, answer, {}) == pytest.approx(reward)


def test_boxes_are_matched_the_best_first() -> None:
    wanted = find_boxes("[[0, 0, 10, 10], [0, 0, 10, 8]]")
    assert mean_iou(find_boxes("[0, 0, 10, 8]"), wanted) == pytest.approx(0.5), "it is the second, not the first"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("(5, 6)", 1.0),
        ("<answer>click(10, 0)</answer>", 1.0),
        ("[11, 5]", 0.0),
        ("5.5,-1", 0.0),
        ("nowhere", 0.0),
    ],
)
def test_point_in_box(response: str, reward: float) -> None:
    assert point_in_box(response, "[0, 0, 10, 10]", {}) == reward


def test_edit_similarity_is_one_less_the_share_of_edits() -> None:
    assert edit_similarity("sitting", "kitten", {}) == pytest.approx(1 - 3 / 7)
    assert edit_similarity("<answer> same </answer>", "same", {}) == 1.0
    assert edit_similarity("", "abc", {}) == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("hanoi", "hanoj", 0.8),
        ("Room B12", "room b12", 1.0),
        ("48.2", '["1490", "48.2"]', 1.0),
        ("completely different", "room b12", 0.0),
        ("ab", "ax", 0.0),
        ("12", "12", 1.0),
    ],
)
def test_anls_is_the_best_similarity_above_a_half(response: str, answer: str, reward: float) -> None:
    assert anls(response, answer, {}) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        # of Open-R1's tests
        ("<think>Some reasoning</think><answer>The answer</answer>", 1.0),
        ("<think>\nSome reasoning\n</think>\n<answer>\nThe answer\n</answer>\n", 1.0),
        ("<think>Some reasoning</think>", 0.0),
        ("<answer>The answer</answer>", 0.0),
        ("So: <think>Some reasoning</think><answer>The answer</answer>", 0.0),
        # of EasyR1's
        ("<think>3 + 4</think> The answer is \\boxed{7}.", 1.0),
        ("The answer is \\boxed{7}.", 0.0),
    ],
)
def test_think_format_wants_the_thought_and_the_answer(response: str, reward: float) -> None:
    assert think_format(response, "", {}) == reward


@pytest.mark.parametrize(("num_tokens", "reward"), [(50, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (110, -1.0)])
def test_soft_overlong_falls_from_the_buffer_to_the_end(num_tokens: int, reward: float) -> None:
    """The cases are those of TRL's tests, with 100 tokens and a buffer of 20."""
    assert soft_overlong("", "", {}, num_tokens=num_tokens, max_tokens=100, buffer=20) == reward
    assert soft_overlong("", "", {}, num_tokens=num_tokens, max_tokens=100) == reward, "a fifth"
