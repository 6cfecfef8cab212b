"""What the judge is asked while it learns: first which digit it sees, then whether an answer is right.

An answer is the right digit or, as often, a wrong one: mostly another digit, else more or less than one digit. A judge
that never saw the latter might say yes to them, and a policy would find out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from examples.digits.data import QUESTION

TEMPLATE = "{response}?"
"""`reward.judges.digits.template` of the configs. Short, since each token is computed for each answer."""
YES = "yes"
NO = "no"
TOKENIZER_TEXT = f"{YES}\n{NO}\n" * 60
"""Makes a single token of either."""
DIGITS = tuple("0123456789")
NO_DIGIT_FRAC = 0.15
"""Share of the wrong answers that are more, or less, than one digit."""
MAX_PIECES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Questions about scans, and the one token that answers each."""

    scans: tuple[int, ...]
    """[B] places in the set of scans."""
    questions: tuple[str, ...]
    """[B]"""
    answers: tuple[str, ...]
    """[B]"""


def reading(digits: Sequence[str], scans: Sequence[int]) -> Lesson:
    """Which digit is it? `digits`: [N] the right ones of all scans."""
    return Lesson(scans=tuple(scans), questions=(QUESTION,) * len(scans), answers=tuple(digits[i] for i in scans))


def judging(digits: Sequence[str], scans: Sequence[int], pieces: Sequence[str], rng: random.Random) -> Lesson:
    """Every scan twice: is the right digit right, and is something else? `pieces`: what wrong answers are made of."""
    answers = [digits[i] for i in scans] + [draw_wrong(rng, digits[i], pieces) for i in scans]
    return Lesson(
        scans=(*scans, *scans),
        questions=tuple(TEMPLATE.format(response=answer) for answer in answers),
        answers=(YES,) * len(scans) + (NO,) * len(scans),
    )


def draw_wrong(rng: random.Random, right: str, pieces: Sequence[str]) -> str:
    """Any answer but the right one."""
    if rng.random() >= NO_DIGIT_FRAC:
        return rng.choice([digit for digit in DIGITS if digit != right])
    parts = rng.choices(pieces, k=rng.randint(0, MAX_PIECES))
    if rng.random() < 0.5:
        parts.insert(rng.randint(0, len(parts)), right)
    answer = "".join(parts)
    return answer if answer != right else right + right
