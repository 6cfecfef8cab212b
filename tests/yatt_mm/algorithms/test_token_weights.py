"""Tests of the weights of tokens, against weights that were worked out by hand."""

import pytest

from yatt_mm.algorithms.settings import TokenWeights
from yatt_mm.algorithms.token_weights import UpdateWeights, Weighting

RESPONSES = [(2, "stop"), (4, "stop"), (8, "length"), (0, "stop")]
"""Responses of 2, 4 and 8 tokens, of which the last was cut; and one without a token."""


@pytest.mark.parametrize(
    ("kind", "drops", "wanted", "total"),
    [
        ("token_mean", False, [1 / 14, 1 / 14, 1 / 14, 0], 1.0),
        ("token_mean", True, [1 / 6, 1 / 6, 0, 0], 1.0),
        ("sequence_mean", False, [1 / 6, 1 / 12, 1 / 24, 0], 1.0),
        ("sequence_mean", True, [1 / 4, 1 / 8, 0, 0], 1.0),
        ("constant", False, [1 / 24, 1 / 24, 1 / 24, 0], 14 / 24),
        ("constant", True, [1 / 16, 1 / 16, 0, 0], 6 / 16),
    ],
)
def test_each_kind_has_the_hand_worked_weights(
    kind: TokenWeights, drops: bool, wanted: list[float], total: float
) -> None:
    weights = UpdateWeights.of(Weighting(kind=kind, max_tokens=8, drops_truncated=drops), RESPONSES)
    found = [weights.of_response(length, reason) for length, reason in RESPONSES]
    assert found == pytest.approx(wanted)
    assert weights.total == pytest.approx(total)
    assert sum(weight * length for weight, (length, _) in zip(found, RESPONSES, strict=True)) == pytest.approx(total)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant"])
def test_an_update_without_a_response_that_counts_has_no_weight(kind: TokenWeights) -> None:
    weights = UpdateWeights.of(Weighting(kind=kind, max_tokens=8, drops_truncated=True), [(8, "length")])
    assert weights.of_response(8, "length") == 0.0
    assert weights.total == 0.0
