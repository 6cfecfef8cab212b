"""Reads scores from a judge's verdicts, in four ways, each a pure class. Imported in controllers: no torch.

A verdict that cannot be read is None; the caller decides whether to ask again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

MAX_WORDS = 20
"""The most tokens whose probabilities vLLM and OpenAI's protocol return (`max_logprobs`, `top_logprobs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YesNo:
    """The score is p(yes) / (p(yes) + p(no)) for the first token. No text is read, and sampling has no influence."""

    yes: tuple[str, ...] = ("yes", "Yes", " yes", " Yes")
    """The texts that mean yes. A text counts only if it is a single token of the judge's tokenizer."""
    no: tuple[str, ...] = ("no", "No", " no", " No")

    def __post_init__(self) -> None:
        for key, words in (("yes", self.yes), ("no", self.no)):
            if not all(words) or not words:
                raise ValueError(f"the words that mean {key} are {list(words)}; name one at least, and no empty one")
        if both := set(self.yes) & set(self.no):
            raise ValueError(f"{min(both)!r} means both yes and no; take it from one of the two")
        num_words = len(self.yes) + len(self.no)
        if num_words > MAX_WORDS:
            raise ValueError(
                f"{num_words} words mean yes or no, and an engine tells of at most {MAX_WORDS}: leave some out"
            )

    def token_ids(self, encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids of the words that are single tokens: those of yes, and those of no. `encode`: the judge's
        tokenizer. Raises ValueError if there are none."""
        yes, no = (_single_tokens(words, encode) for words in (self.yes, self.no))
        return yes, no

    def score(self, logprobs_yes: Sequence[float], logprobs_no: Sequence[float]) -> float | None:
        """Return p(yes) / (p(yes) + p(no)) in [0, 1]; None where the judge gives both a probability of zero."""
        yes, no = (math.fsum(map(math.exp, values)) for values in (logprobs_yes, logprobs_no))
        total = yes + no
        return yes / total if total > 0 and math.isfinite(total) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexScore:
    """The score is a number that a regular expression captures, divided by `scale`. The last match counts, after all
    reasoning."""

    pattern: str
    """A regular expression with one group around the number."""
    scale: float = 1.0
    """The best number that the template asks for; the score is the number divided by it."""

    def __post_init__(self) -> None:
        try:
            num_groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"the pattern {self.pattern!r} is not a regular expression: {error}") from error
        if num_groups != 1:
            raise ValueError(f"the pattern {self.pattern!r} has {num_groups} groups; wanted one, around the number")
        _check_scale(self.scale)

    def score(self, text: str) -> float | None:
        """Return the score in [0, 1]; None where nothing matches, or the match is not a number in 0..scale."""
        found = re.findall(self.pattern, text, flags=re.DOTALL)
        return _scaled(found[-1], self.scale) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonScore:
    """The score is a field of the last JSON object in the text, divided by `scale`; true and false count as scale and
    0."""

    field: str = "score"
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def score(self, text: str) -> float | None:
        """Return the score in [0, 1]; None where there is no JSON object, or its field is not a number in 0..scale."""
        found = None
        for value in _objects(text):
            if self.field in value:
                found = value[self.field]
        if isinstance(found, bool):
            return float(found)
        return _scaled(found, self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelScore:
    """The score is what a sequence classifier gives to one of its labels. No text is sampled or read."""

    label: int = 0
    """The label's row in the classification head."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """The function of the logit: none (reward models in the sense of Bradley and Terry), or a probability."""

    def score(self, logits: Sequence[float]) -> float | None:
        """Return the score from one logit per label: in [0, 1] with an activation, any number without. None where it is
        not finite."""
        score = logits[self.label]
        if self.activation == "sigmoid":
            score = 0.5 * (1.0 + math.tanh(0.5 * score))
        elif self.activation == "softmax":
            most = max(logits)
            score = math.exp(score - most) / math.fsum(math.exp(logit - most) for logit in logits)
        return score if math.isfinite(score) else None


SpokenVerdict = YesNo | RegexScore | JsonScore
Verdict = SpokenVerdict | LabelScore


def _check_scale(scale: float) -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it is the best score the judge can give, so it must be above 0")


def _scaled(value: object, scale: float) -> float | None:
    if not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # an int of JSON may be larger than any float
        return None
    return number / scale if 0.0 <= number <= scale else None


def _objects(text: str) -> list[dict[str, object]]:
    """Return every JSON object that begins somewhere in the text and is not inside another one."""
    decoder = json.JSONDecoder()
    objects: list[dict[str, object]] = []
    place = text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):  # not JSON, or an int longer than Python reads
            end = place + 1
        else:
            objects.append(value)
        place = text.find("{", end)
    return objects


def _single_tokens(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    ids = [encode(word) for word in words]
    found = tuple(dict.fromkeys(own[0] for own in ids if len(own) == 1))
    if not found:
        raise ValueError(
            f"none of {', '.join(map(repr, words))} is a single token of the judge's tokenizer; set yes_words and "
            "no_words to texts that are, or read the verdict with a pattern"
        )
    return found
