"""The questions from which the judge learns: first which digit it sees, then whether a response is right.

Half of the responses are the right digit. The others are wrong: mostly another digit, sometimes more or less than one
digit. A judge that never saw the latter might say yes to them, and a policy would learn to use that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from examples.digits.data import QUESTION

TEMPLATE = "{response}?"
"""The template of the judge's prompt, `reward.judges.digits.template` of the configs. It is short, because each token
is computed for each answer."""
YES = "yes"
NO = "no"
TOKENIZER_TEXT = f"{YES}\n{NO}\n" * 60
"""The text that makes the tokenizer learn a single token for each of the two verdicts."""
DIGITS = tuple("0123456789")
NO_DIGIT_FRAC = 0.15
"""The share of the wrong answers that are more, or less, than one digit."""
MAX_PIECES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Questions about scans, and the one token that answers each."""

    scans: tuple[int, ...]
    """[B] the number of each scan in the set of scans."""
    questions: tuple[str, ...]
    """[B] the text of each question."""
    answers: tuple[str, ...]
    """[B] the text of each answer."""


def reading(digits: Sequence[str], scans: Sequence[int]) -> Lesson:
    """Return the questions "which digit is it?" about these scans. `digits`: [N] the right digit of each scan there
    is."""
    return Lesson(scans=tuple(scans), questions=(QUESTION,) * len(scans), answers=tuple(digits[i] for i in scans))


def judging(digits: Sequence[str], scans: Sequence[int], pieces: Sequence[str], rng: random.Random) -> Lesson:
    """Return two questions about each scan: whether the right digit is right, and whether a wrong response is. Wrong
    responses are made of the texts `pieces`."""
    answers = [digits[i] for i in scans] + [draw_wrong(rng, digits[i], pieces) for i in scans]
    return Lesson(
        scans=(*scans, *scans),
        questions=tuple(TEMPLATE.format(response=answer) for answer in answers),
        answers=(YES,) * len(scans) + (NO,) * len(scans),
    )


def draw_wrong(rng: random.Random, right: str, pieces: Sequence[str]) -> str:
    """Return a random wrong response."""
    if rng.random() >= NO_DIGIT_FRAC:
        return rng.choice([digit for digit in DIGITS if digit != right])
    parts = rng.choices(pieces, k=rng.randint(0, MAX_PIECES))
    if rng.random() < 0.5:
        parts.insert(rng.randint(0, len(parts)), right)
    answer = "".join(parts)
    return answer if answer != right else right + right
