"""What an evaluation measures of several responses to each prompt: `mean@k`, `pass@k`, `maj@k`. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

RIGHT = 0.5
"""A response with at least this score counts as right."""


def measure(name: str, scores: Sequence[float], answers: Sequence[str]) -> float:
    """Return a metric of one prompt. `scores`: [G] those of its responses. `answers`: [G] what these answer, for a
    vote."""
    kind, _, k = name.partition("@")
    if kind == "pass":
        return pass_at(int(k), scores)
    if kind == "maj":
        return maj_at(int(k), scores, answers)
    return sum(scores[: int(k)]) / int(k)


def pass_at(k: int, scores: Sequence[float]) -> float:
    """Return the probability that one of k responses, drawn from these without replacement, is right: the unbiased
    estimate of Chen et al., arXiv 2107.03374, 1 - C(n - c, k) / C(n, k)."""
    num_wrong = sum(score < RIGHT for score in scores)
    return 1.0 - comb(num_wrong, k) / comb(len(scores), k)


def maj_at(k: int, scores: Sequence[float], answers: Sequence[str]) -> float:
    """Return 1.0 if the answer that most of the first k responses give is right, else 0.0. Of several such answers the
    one that is given first counts."""
    votes = Counter(answers[:k])
    chosen = max(votes, key=lambda answer: votes[answer])
    return float(scores[answers.index(chosen)] >= RIGHT)
