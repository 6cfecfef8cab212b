"""Supervised steps that teach the model to read digits, and then to say one of the two digits of a pair, whichever it
is.

First it reads single scans, as in the digits example. Then it sees pairs, and a coin decides which of the two digits
counts as the answer: so it learns to read both images and the form of an answer, but nothing about which digit is
larger. That is left to reinforcement learning, which begins with the larger digit in about half of the answers.
examples/supervised.py has the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.media.images import decode_image
from examples import preparing, supervised
from examples.compare.data import ANSWERS, CHAT, Pair, Split
from examples.digits.data import QUESTION as READING_QUESTION
from examples.digits.data import DigitSample
from yatt_mm.common.conversation import Conversation, ask
from yatt_mm.generation.conversation_reader import ConversationReader

READING_ACCURACY = 0.97
"""The share of held-out scans, 0 to 1, at which reading single scans ends."""
ACCURACY_RANGE = (0.35, 0.65)
"""The range of held-out accuracies on pairs, 0 to 1, in which the warm-up has succeeded. The best constant answer, 9,
is right on a fifth of the pairs."""
NUM_FORM_STEPS = 30
MAX_READING_STEPS = 500
NUM_PAIR_STEPS = 200
ANSWER_LR = 5e-4
LABEL_SMOOTHING = 0.1

OnStep = Callable[[str, int, float], None]
"""A function that gets the stage, the number of steps done over all stages, and the stage's latest held-out
accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup(preparing.Warmup):
    """The result of both stages of the warm-up."""

    reading_accuracy: float
    """The share of held-out scans that the model could read after the first stage, 0 to 1."""


def conversation() -> Conversation:
    """Return the conversation of every pair, read as a run reads it: a system turn, and a turn of the user with two
    images and text around them."""
    return ConversationReader().read(list(CHAT), ["image", "image"], {}).given


def warm_up(
    directory: Path, split: Split, *, seed: int = 0, on_step: OnStep = lambda stage, step, accuracy: None
) -> Warmup:
    """Train the model folder in place, in both stages.

    Raises:
        WarmupError: the model does not learn to read, or its accuracy on pairs ends outside `ACCURACY_RANGE`; the
            folder has the model of the last stage that succeeded.
    """
    read = supervised.warm_up(
        directory,
        _lessons(
            ask(READING_QUESTION, ["image"]),
            target=READING_ACCURACY,
            accuracy_range=(READING_ACCURACY, 1.0),
            num_form_steps=NUM_FORM_STEPS,
            max_steps=MAX_READING_STEPS,
        ),
        train=_scans(split.scans.train),
        held_out=_scans(split.scans.held_out),
        seed=seed,
        on_step=lambda step, accuracy: on_step("reading", step, accuracy),
    )
    paired = supervised.warm_up(
        directory,
        _lessons(conversation(), target=1.0, accuracy_range=ACCURACY_RANGE, num_form_steps=0, max_steps=NUM_PAIR_STEPS),
        train=_pairs(toss(split.train, seed)),
        held_out=_pairs(split.held_out),
        seed=seed,
        on_step=lambda step, accuracy: on_step("either digit", read.num_steps + step, accuracy),
    )
    return Warmup(num_steps=read.num_steps + paired.num_steps, reading_accuracy=read.accuracy, accuracy=paired.accuracy)


def toss(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """Return the pairs with the first or the second digit as the answer, as a coin falls."""
    sides = np.random.default_rng(seed).integers(2, size=len(pairs))
    return [replace(pair, answer=pair.digits[side]) for pair, side in zip(pairs, sides)]


def _lessons(conversation: Conversation, **settings: Any) -> supervised.Lessons:
    return supervised.Lessons(
        module="examples/compare/warmup.py",
        conversation=conversation,
        answers=("0", *ANSWERS),
        answer_lr=ANSWER_LR,
        label_smoothing=LABEL_SMOOTHING,
        **settings,
    )


def _scans(scans: Sequence[DigitSample]) -> list[supervised.Sample]:
    return [supervised.Sample(media=(decode_image(scan.png)[0],), answer=scan.answer) for scan in scans]


def _pairs(pairs: Sequence[Pair]) -> list[supervised.Sample]:
    return [
        supervised.Sample(media=tuple(decode_image(png)[0] for png in pair.pngs), answer=pair.answer) for pair in pairs
    ]
