"""Tests of the divergence from a reference: values and gradients worked out by hand, what the estimators estimate, and
what their gradients descend."""

from __future__ import annotations

import math

import pytest
import torch

from yatt_mm.algorithms.kl import ESTIMATORS, adapted
from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.algorithms.losses import clipped, policy_loss
from yatt_mm.algorithms.settings import AlgorithmSettings, KlEstimator, KlSettings

HALF = math.log(2)
"""The log-ratio of a token that the policy makes twice as likely as the reference."""
BY_HAND = {
    "k1": {HALF: (HALF, 1.0), -HALF: (-HALF, 1.0), 0.0: (0.0, 1.0)},
    "k2": {HALF: (HALF**2 / 2, HALF), -HALF: (HALF**2 / 2, -HALF), 0.0: (0.0, 0.0)},
    "k3": {HALF: (0.5 - 1 + HALF, 0.5), -HALF: (2 - 1 - HALF, -1.0), 0.0: (0.0, 0.0)},
}
"""By estimator and log-ratio the value and its slope."""


@pytest.mark.parametrize("name", ESTIMATORS)
def test_values_and_slopes_are_those_worked_out_by_hand(name: KlEstimator) -> None:
    for difference, wanted in BY_HAND[name].items():
        at = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
        value = ESTIMATORS[name](at)
        (slope,) = torch.autograd.grad(value.sum(), at)
        assert (float(value.detach()), float(slope)) == pytest.approx(wanted, abs=1e-12)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)


REFERENCE = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(-1)


def divergence(of: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (of.exp() * (of - other)).sum()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_mean_over_all_tokens_is_the_divergence(name: KlEstimator, logits: torch.Tensor) -> None:
    policy = logits.log_softmax(-1).detach()
    mean = (policy.exp() * ESTIMATORS[name](policy - REFERENCE)).sum()
    assert float(mean) == pytest.approx(float(divergence(policy, REFERENCE)))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_mean_of_the_gradient_is_what_the_docstring_says(name: KlEstimator, logits: torch.Tensor) -> None:
    policy = logits.log_softmax(-1)
    mean = (policy.detach().exp() * ESTIMATORS[name](policy - REFERENCE)).sum()  # tokens are drawn, then differentiated
    (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
    wanted = {
        "k1": torch.zeros_like(found),
        "k2": torch.autograd.grad(divergence(policy, REFERENCE), logits, retain_graph=True)[0],
        "k3": torch.autograd.grad(divergence(REFERENCE, policy), logits, retain_graph=True)[0],
    }[name]
    assert torch.allclose(found, wanted, atol=1e-12)
    assert name == "k1" or float(found.norm()) > 0.1


@pytest.mark.parametrize(
    ("estimator", "value", "slope"), [("k2", HALF**2 / 2, HALF), ("k3", 0.5 - 1 + HALF, 0.5)], ids=["k2", "k3"]
)
def test_the_loss_adds_the_weighted_divergence(estimator: KlEstimator, value: float, slope: float) -> None:
    weights = torch.tensor([0.3, 0.2], dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        weights=weights,
        advantages=torch.tensor([2.0, -1.0], dtype=torch.float64),
        old_logprobs=logprobs.detach(),
        is_current=torch.tensor([True, True]),
        rollout_logprobs=logprobs.detach(),
        reference_logprobs=torch.tensor([-1.0 - HALF, -2.0], dtype=torch.float64),
        sequences=torch.tensor([0, 1]),
        num_sequences=2,
    )
    settings = AlgorithmSettings(kl=KlSettings(where="loss", estimator=estimator, coef=0.1))
    loss, metrics = policy_loss(
        logprobs, torch.zeros(2), inputs, surrogate=clipped, settings=settings, total_weight=0.5
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert float(loss.detach()) == pytest.approx(-(0.3 * 2 - 0.2 * 1) + 0.1 * 0.3 * value)
    assert gradient.tolist() == pytest.approx([-0.3 * 2 + 0.1 * 0.3 * slope, 0.2])
    assert float(metrics["kl"]) == pytest.approx(0.3 / 0.5 * value), "a mean, whatever the weights add up to"


@pytest.mark.parametrize(
    ("measured", "becomes"), [(0.05, 0.5), (0.055, 0.505), (0.045, 0.495), (9.0, 0.51), (0.0, 0.49), (-1.0, 0.49)]
)
def test_the_weight_follows_the_divergence_by_two_percent_at_most(measured: float, becomes: float) -> None:
    assert adapted(0.5, measured, target=0.05) == pytest.approx(becomes)
