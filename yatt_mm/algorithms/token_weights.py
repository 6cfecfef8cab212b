"""How much each sampled token counts in an update, without torch: controllers put it into the plan.

A loss is the sum over tokens of weight times the token's value. The weights count all replicas, so nothing is divided
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from yatt_mm.algorithms.settings import TokenWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """The rule by which the tokens of an update are weighted."""

    kind: TokenWeights = "token_mean"
    max_tokens: int = 1
    """The longest response that the run allows, in tokens: what `constant` divides by."""
    drops_truncated: bool = False
    """True gives responses that were cut at that length no weight (DAPO's overlong filtering, arXiv 2503.14476, section
    3.4)."""

    def counts(self, length: int, finish_reason: str) -> bool:
        """Return True if a response of `length` tokens has a weight."""
        return length > 0 and not (self.drops_truncated and finish_reason == "length")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """The weights of all tokens of one update."""

    rule: Weighting
    num_sequences: int
    """The number of its responses that count."""
    num_tokens: int
    """The number of their tokens."""

    @classmethod
    def of(cls, rule: Weighting, responses: Iterable[tuple[int, str]]) -> UpdateWeights:
        """Return the weights of an update on all these responses: (number of tokens, finish reason)."""
        lengths = [length for length, reason in responses if rule.counts(length, reason)]
        return cls(rule=rule, num_sequences=len(lengths), num_tokens=sum(lengths))

    def of_response(self, length: int, finish_reason: str) -> float:
        """Return the weight of each token of a response.

        `token_mean`: every token has the same share of the update (DAPO, arXiv 2503.14476, section 3.3).
        `sequence_mean`: every response has the same share, divided equally among its tokens (GRPO, arXiv 2402.03300,
        equation 3). `constant`: every token has the share of one of `max_tokens` tokens of a response (Dr. GRPO, arXiv
        2503.20783), so that the weights of an update add up to less than 1.
        """
        if not self.rule.counts(length, finish_reason):
            return 0.0
        if self.rule.kind == "token_mean":
            return 1 / self.num_tokens
        if self.rule.kind == "sequence_mean":
            return 1 / (self.num_sequences * length)
        return 1 / (self.num_sequences * self.rule.max_tokens)

    @property
    def total(self) -> float:
        """The sum of all weights: 1 unless the kind is `constant`, and 0 if no response counts."""
        if not self.num_sequences:
            return 0.0
        if self.rule.kind != "constant":
            return 1.0
        return self.num_tokens / (self.num_sequences * self.rule.max_tokens)
