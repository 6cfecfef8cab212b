"""The reward functions of the project. A reward function is a plain function (response, answer, fields) -> float, named
in `reward.function`; a function of your own can call several of them.

`fields` has all fields of the sample. A response that cannot be parsed scores 0. Where a function looks for the final
answer of a response, that is what stands in the last `<answer></answer>`, or in the last `\\boxed{}`, or else the whole
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from yatt_mm.algorithms.advantages import overlong_penalty
from yatt_mm.rewards.answers import final_answer
from yatt_mm.rewards.boxes import find_boxes, find_points, mean_iou


def exact_match(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return 1.0 if the response, without white space at both ends, equals the answer, else 0.0."""
    return float(response.strip() == answer.strip())


def regex_match(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return 1.0 if the text that `fields["pattern"]` captures in the response equals the answer, else 0.0.

    The pattern (default: the last number in the text) must have one group; its last match counts.
    """
    pattern = fields.get("pattern") or r"(-?\d+(?:\.\d+)?)(?!.*\d)"
    found = re.findall(pattern, response, flags=re.DOTALL)
    return float(bool(found) and str(found[-1]).strip() == answer.strip())


def mathematics(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    r"""Return 1.0 if the response's final answer means the same as the answer, else 0.0: `1/2`, `\frac{1}{2}` and `0.5`
    do. math-verify compares them.

    In a text without a final answer, math-verify finds one. Answers that are no mathematics, such as a letter, count if
    the final answer is the same text.
    """
    from yatt_mm.rewards.mathematics import is_equal

    found = final_answer(response)
    wanted = final_answer(answer) or answer.strip()
    return float(is_equal(found, wanted, text=response))


def choice_letter(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return 1.0 if the response chooses the letter of the answer, else 0.0: `B`, `(B)`, `B. a dog`, `The answer is B.`

    Of several letters, the one that is called the answer counts, or else the last one in brackets, or else the last one
    that stands alone at the end of a sentence.
    """
    chosen = _letter(final_answer(response) or response)
    return float(chosen is not None and chosen == _letter(answer))


def number(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return 1.0 if the last number of the final answer is the answer's, to within 5 %, else 0.0, as ChartQA's relaxed
    accuracy. `fields["tolerance"]` is another share than 0.05. An answer that is no number wants the same text."""
    text = final_answer(response) or response
    if _NUMBER.fullmatch(answer.strip().strip("$")) is None:
        return float(text.strip().casefold() == answer.strip().casefold())
    found, wanted = _numbers(text), _numbers(answer)[0]
    tolerance = float(fields.get("tolerance") or 0.05)
    return float(bool(found) and abs(found[-1] - wanted) <= tolerance * abs(wanted))


def box_iou(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return how well the boxes in the final answer match those of the answer, from 0 to 1.

    Boxes are [x1, y1, x2, y2], in any text: also Qwen's `{"bbox_2d": [...]}`. Boxes are matched by their intersection
    over union, the highest first. The score is the sum of the matches over the number of boxes of the longer list.
    """
    return mean_iou(find_boxes(final_answer(response) or response), find_boxes(answer))


def point_in_box(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return 1.0 if the first point `x, y` of the final answer lies in the box of the answer, [x1, y1, x2, y2], else
    0.0."""
    points, boxes = find_points(final_answer(response) or response), find_boxes(answer)
    if not points or not boxes:
        return 0.0
    (x, y), (x1, y1, x2, y2) = points[0], boxes[0]
    return float(x1 <= x <= x2 and y1 <= y <= y2)


def edit_similarity(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return how similar the final answer is to the answer, from 0 to 1: 1 less the edit distance over the length of
    the longer text, for reading text in images."""
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.normalized_similarity((final_answer(response) or response).strip(), answer.strip())


def anls(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return DocVQA's score, from 0 to 1: the highest similarity to one of the answers, or 0 if it is at most 0.5.
    Small and large letters are the same. The answer is a text, or a JSON list of texts."""
    answers = _texts(answer)
    text = (final_answer(response) or response).strip().casefold()
    best = max(edit_similarity(text, wanted.casefold(), fields) for wanted in answers)
    return best if best > 0.5 else 0.0


def think_format(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    r"""Return 1.0 if the response has the form `<think>...</think><answer>...</answer>`, as in R1-V, or
    `<think>...</think>... \boxed{...}`, as in EasyR1, else 0.0."""
    return float(any(form.fullmatch(response.strip()) for form in _THINK_FORMS))


def soft_overlong(
    response: str, answer: str, fields: Mapping[str, Any], *, num_tokens: int, max_tokens: int, buffer: int = 0
) -> float:
    """Return DAPO's penalty for long responses, from 0 to -1: it begins `buffer` tokens before `max_tokens`, by default
    a fifth of them, and falls linearly. Add it to another reward."""
    buffer = buffer or max(1, max_tokens // 5)
    return overlong_penalty(num_tokens, max_tokens=max_tokens, buffer=buffer)


_CALLED_ANSWER = re.compile(r"\b(?:answer|option|choice)\b(?:\s+is)?\s*:?\s*\**\(?([A-Z])\b(?!')", re.IGNORECASE)
_IN_BRACKETS = re.compile(r"\(([A-Z])\)")
_AT_THE_BEGINNING = re.compile(r"\s*\**(?:\(([A-Z])\)|([A-Z]))\**\s*(?:[.:)]|$)")
_TEXT = re.compile(r"\\text\{([^}]*)\}")
_AT_AN_END = re.compile(r"(?<![\w'])([A-Z])\**\s*(?:[.!]|$)", re.MULTILINE)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?\s*%?|[-+]?\.\d+")
_THINK_FORMS = (
    re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL),
    re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL),
)


def _letter(text: str) -> str | None:
    """Return the letter that a text chooses; None if it chooses none."""
    text = _TEXT.sub(r"\1", text)
    called = [letter for letter in _CALLED_ANSWER.findall(text) if letter.isupper()]
    if not called and (first := _AT_THE_BEGINNING.match(text)):
        return str(first[1] or first[2])
    letters = called or _IN_BRACKETS.findall(text) or _AT_AN_END.findall(text)
    return letters[-1] if letters else None


def _numbers(text: str) -> list[float]:
    """Return the numbers in a text; 12% is 0.12."""
    found = (number.replace(",", "").strip() for number in _NUMBER.findall(text))
    return [float(number[:-1]) / 100 if number.endswith("%") else float(number) for number in found]


def _texts(answer: str) -> list[str]:
    try:
        listed = json.loads(answer)
    except ValueError:
        return [answer]
    return [str(item) for item in listed] if isinstance(listed, list) and listed else [answer]
