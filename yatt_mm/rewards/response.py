"""A response as reward functions see it, with everything that they may ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yatt_mm.rewards.medium import Medium


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response to score."""

    text: str
    answer: str
    fields: Mapping[str, Any]
    conversation: Sequence[Mapping[str, Any]] = ()
    """The turns that the policy read, as a chat template gets them."""
    group: Sequence[str] = ()
    """All responses to the same prompt, this one among them."""
    media: Sequence[Medium] = ()
    """The media of the prompt, in the order of the conversation."""
    num_tokens: int = 0
    """The length of the response in tokens."""
    max_tokens: int = 0
    """The longest response that the run allows, in tokens."""

    def value(self, name: str) -> Any:
        """Return what a parameter of this name gets. See `ARGUMENTS`."""
        return ARGUMENTS[name](self)


ARGUMENTS = {
    "response": lambda this: this.text,
    "answer": lambda this: this.answer,
    "fields": lambda this: dict(this.fields),  # a copy, which the function may change
    "conversation": lambda this: [dict(turn) for turn in this.conversation],
    "group": lambda this: list(this.group),
    "media": lambda this: list(this.media),
    "num_tokens": lambda this: this.num_tokens,
    "max_tokens": lambda this: this.max_tokens,
    # as verl calls them
    "solution_str": lambda this: this.text,
    "ground_truth": lambda this: this.answer,
    "data_source": lambda this: this.fields.get("data_source"),
    "extra_info": lambda this: this.fields.get("extra_info"),
}
"""What the parameters of a reward function may be called, and what each gets."""
