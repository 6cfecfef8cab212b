"""Tests of the correction of engine against trainer, against numbers that were worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from yatt_mm.algorithms.correction import READS, correct, effective_share, metrics_of
from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.algorithms.losses import clipped, policy_loss
from yatt_mm.algorithms.settings import AlgorithmSettings, CorrectionSettings

LOGPROB = -1.0
RATIOS = [0.25, 4.0, 1.5, 3.0, 0.8, 1.0, 0.05]
"""Ratios of trainer to engine of three responses, of 2, 3 and 2 tokens."""
LENGTHS = [2, 3, 2]
PRODUCTS = [1.0, 3.6, 0.05]
WEIGHTS = [0.1, 0.2, 0.05, 0.15, 0.2, 0.2, 0.1]


def inputs_of(*, is_current: bool = False) -> LossInputs:
    """Return inputs for tokens with the log-probability `LOGPROB` under the proximal policy."""
    return LossInputs(
        weights=torch.tensor(WEIGHTS, dtype=torch.float64),
        advantages=torch.tensor([1.0, 1.0, -2.0, -2.0, -2.0, 1.0, 1.0], dtype=torch.float64),
        old_logprobs=torch.full((7,), LOGPROB, dtype=torch.float64),
        is_current=torch.full((7,), is_current),
        rollout_logprobs=torch.tensor([LOGPROB - math.log(ratio) for ratio in RATIOS], dtype=torch.float64),
        sequences=torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)),
        num_sequences=3,
    )


def spread(values: list[float]) -> list[float]:
    """Return for each token the value of its response."""
    return [value for value, length in zip(values, LENGTHS, strict=True) for _ in range(length)]


def kind(name: str, **settings: Any) -> CorrectionSettings:
    return CorrectionSettings(**{"kind": name, **READS[name], **settings})


def corrected(settings: CorrectionSettings) -> tuple[list[float], list[bool]]:
    found = correct(torch.full((7,), LOGPROB, dtype=torch.float64, requires_grad=True), inputs_of(), settings)
    assert not found.weights.requires_grad and not found.log_ratio.requires_grad
    return found.weights.tolist(), found.is_cut.tolist()


ROOTS = [1.0, 3.6 ** (1 / 3), 0.05**0.5]
CASES = {
    "a ratio counts up to the cap, and has no floor": (
        kind("tis"),
        [0.25, 2.0, 1.5, 2.0, 0.8, 1.0, 0.05],
        [False, True, False, True, False, False, False],
    ),
    "without a cap no ratio is cut": (kind("tis", cap=math.inf), RATIOS, [False] * 7),
    "a token above the cap or below the floor is left out": (
        kind("icepop", floor=0.2, cap=3.5),
        [0.25, 0.0, 1.5, 3.0, 0.8, 1.0, 0.0],
        [False, True, False, False, False, False, True],
    ),
    "the ratio of a response is the product": (
        kind("tis", level="sequence"),
        spread([1.0, 2.0, 0.05]),
        spread([False, True, False]),
    ),
    "a response is left out": (
        kind("icepop", level="sequence", floor=0.5, cap=5.0),
        spread([1.0, 3.6, 0.0]),
        spread([False, False, True]),
    ),
    "a geometric mean does not grow with the length": (
        kind("tis", level="geometric", cap=1.2),
        spread([1.0, 1.2, ROOTS[2]]),
        spread([False, True, False]),
    ),
    "a response is left out by its geometric mean": (
        kind("icepop", level="geometric", floor=0.1, cap=1.2),
        spread([1.0, 0.0, ROOTS[2]]),
        spread([False, True, False]),
    ),
    "one token that is too unlikely leaves its response out": (
        kind("tis", worst_ratio=10.0),
        [0.25, 2.0, 1.5, 2.0, 0.8, 0.0, 0.0],
        [False, True, False, True, False, True, True],
    ),
    "one token that is too likely leaves its response out": (
        kind("tis", level="geometric", cap=9.0, worst_ratio=3.5),
        spread([0.0, ROOTS[1], 0.0]),
        spread([True, False, True]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_corrected_as_by_hand(name: str) -> None:
    settings, weights, is_cut = CASES[name]
    found, cut = corrected(settings)
    assert found == pytest.approx(weights)
    assert cut == is_cut


def test_a_corrected_loss_has_the_gradient_of_the_surrogate_times_the_correction() -> None:
    settings = AlgorithmSettings(correction=kind("tis"), entropy_coef=0.01)
    for is_current in (True, False):  # one update, and the first of several: the proximal policy is the present one
        logprobs = torch.full((7,), LOGPROB, dtype=torch.float64, requires_grad=True)
        entropy = torch.ones(7, dtype=torch.float64, requires_grad=True)
        loss, metrics = policy_loss(
            logprobs, entropy, inputs_of(is_current=is_current), surrogate=clipped, settings=settings
        )
        by_logprobs, by_entropy = torch.autograd.grad(loss, [logprobs, entropy])
        factors = [0.25, 2.0, 1.5, 2.0, 0.8, 1.0, 0.05]
        slopes = [w * f * a for w, f, a in zip(WEIGHTS, factors, [1, 1, -2, -2, -2, 1, 1], strict=True)]
        assert by_logprobs.tolist() == pytest.approx([-slope for slope in slopes])
        assert by_entropy.tolist() == pytest.approx([-0.01 * weight for weight in WEIGHTS]), "the bonus is as it was"
        assert float(loss.detach()) == pytest.approx(-sum(slopes) - 0.01)
        assert metrics["clip_frac"] == 0.0, "the clip compares with the proximal policy"


def test_the_correction_goes_from_the_engine_to_the_start_of_the_step_and_the_ratio_from_there() -> None:
    now = torch.full((7,), LOGPROB + math.log(1.1), dtype=torch.float64)
    loss, metrics = policy_loss(
        now, now, inputs_of(), surrogate=clipped, settings=AlgorithmSettings(correction=kind("tis"))
    )
    factors = [0.25, 2.0, 1.5, 2.0, 0.8, 1.0, 0.05]
    slopes = [w * f * a for w, f, a in zip(WEIGHTS, factors, [1, 1, -2, -2, -2, 1, 1], strict=True)]
    assert float(loss) == pytest.approx(-1.1 * sum(slopes))
    assert float(metrics["approx_kl"]) == pytest.approx(1.1 - 1 - math.log(1.1))


def test_the_metrics_are_those_of_the_hand_worked_corrections() -> None:
    inputs = inputs_of()
    found = metrics_of(
        correct(torch.full((7,), LOGPROB, dtype=torch.float64), inputs, kind("tis")),
        inputs.weights,
    )
    factors = [0.25, 2.0, 1.5, 2.0, 0.8, 1.0, 0.05]
    k3 = sum(weight * (ratio - 1 - math.log(ratio)) for weight, ratio in zip(WEIGHTS, RATIOS, strict=True))
    assert float(found["mismatch_k3"]) == pytest.approx(k3)
    assert float(found["cut_frac"]) == pytest.approx(0.2 + 0.15)
    mean = sum(weight * factor for weight, factor in zip(WEIGHTS, factors, strict=True))
    squares = sum(weight * factor**2 for weight, factor in zip(WEIGHTS, factors, strict=True))
    assert float(found["correction_mean"]) == pytest.approx(mean)
    assert float(found["correction_squares"]) == pytest.approx(squares)


def test_the_effective_share_is_that_of_the_tokens_that_count() -> None:
    assert effective_share(1.0, 1.0) == 1.0
    # four tokens, of which three have the correction 2 and one 0: as good as three of four
    assert effective_share(6 / 4, 12 / 4) == pytest.approx(0.75)
    assert effective_share(0.0, 0.0) == 0.0


def test_without_a_correction_the_engine_makes_no_difference() -> None:
    logprobs = torch.full((7,), LOGPROB, dtype=torch.float64)
    loss, metrics = policy_loss(logprobs, logprobs, inputs_of(), surrogate=clipped, settings=AlgorithmSettings())
    products = [weight * a for weight, a in zip(WEIGHTS, [1, 1, -2, -2, -2, 1, 1], strict=True)]
    assert float(loss) == pytest.approx(-sum(products))
    assert set(metrics) == {"loss", "entropy", "clip_frac", "approx_kl"}


def test_a_token_that_the_engine_gave_no_chance_makes_nothing_infinite() -> None:
    inputs = replace(inputs_of(), rollout_logprobs=torch.full((7,), -200.0, dtype=torch.float32))
    shares = torch.tensor([0.0] + [1 / 6] * 6)
    for settings in (kind("icepop"), kind("tis", cap=math.inf, level="sequence")):
        found = correct(torch.full((7,), LOGPROB), inputs, settings)
        assert found.weights.isfinite().all()
        assert all(value.isfinite() for value in metrics_of(found, shares).values())
