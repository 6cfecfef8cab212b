"""Tests of the policy loss against values and gradients that were worked out by hand."""

import math
from typing import NamedTuple

import pytest
import torch

from yatt_mm.algorithms.losses import LossInputs, clipped_policy_loss

CLIP_LOW, CLIP_HIGH, ENTROPY_COEF = 0.2, 0.28, 0.01


class Token(NamedTuple):
    """One token with what the loss must make of it."""

    ratio: float
    advantage: float
    surrogate: float
    slope: float
    """The derivative of the surrogate by the token's log-probability."""


TOKENS = {
    "too likely already: the upper bound binds": Token(1.5, 2.0, 1.28 * 2, 0.0),
    "too unlikely already: the lower bound binds": Token(0.5, -2.0, 0.8 * -2, 0.0),
    "less likely although it was good: no bound": Token(0.5, 2.0, 0.5 * 2, 0.5 * 2),
    "more likely although it was bad: no bound": Token(1.5, -2.0, 1.5 * -2, 1.5 * -2),
    "between the bounds, where a symmetric clip of 0.2 would bind": Token(1.25, 1.0, 1.25, 1.25),
    "between the bounds": Token(0.9, -1.0, -0.9, -0.9),
}
WEIGHTS = [0.1, 0.2, 0.3, 0.15, 0.05, 0.2]
ENTROPIES = [0.5, 1.0, 0.25, 2.0, 0.1, 0.7]
LOGPROB = -1.0


def inputs_of(tokens: list[Token], is_current: bool = False) -> LossInputs:
    """Return the inputs that give each token its ratio, if its log-probability is `LOGPROB` now."""
    return LossInputs(
        weights=torch.tensor(WEIGHTS[: len(tokens)], dtype=torch.float64),
        advantages=torch.tensor([token.advantage for token in tokens], dtype=torch.float64),
        old_logprobs=torch.tensor([LOGPROB - math.log(token.ratio) for token in tokens], dtype=torch.float64),
        is_current=torch.full((len(tokens),), is_current),
    )


def loss_of(
    inputs: LossInputs, entropy_coef: float = ENTROPY_COEF
) -> tuple[float, list[float], list[float], dict[str, float]]:
    """Return the loss, its gradients by the log-probabilities and by the entropies, and the metrics."""
    num = len(inputs.weights)
    logprobs = torch.full((num,), LOGPROB, dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor(ENTROPIES[:num], dtype=torch.float64, requires_grad=True)
    loss, metrics = clipped_policy_loss(
        logprobs, entropy, inputs, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, entropy_coef=entropy_coef
    )
    by_logprobs, by_entropy = torch.autograd.grad(loss, [logprobs, entropy])
    return (
        float(loss.detach()),
        by_logprobs.tolist(),
        by_entropy.tolist(),
        {name: float(value) for name, value in metrics.items()},
    )


@pytest.mark.parametrize("name", TOKENS)
def test_one_token_has_the_hand_worked_value_and_gradient(name: str) -> None:
    token = TOKENS[name]
    loss, by_logprobs, by_entropy, _ = loss_of(inputs_of([token]))
    weight, entropy = WEIGHTS[0], ENTROPIES[0]
    assert loss == pytest.approx(-weight * token.surrogate - ENTROPY_COEF * weight * entropy)
    assert by_logprobs == pytest.approx([-weight * token.slope])
    assert by_entropy == pytest.approx([-ENTROPY_COEF * weight])


def test_all_tokens_add_up_with_their_weights_and_so_do_the_metrics() -> None:
    tokens = list(TOKENS.values())
    loss, by_logprobs, by_entropy, metrics = loss_of(inputs_of(tokens))
    surrogate = 0.1 * 2.56 + 0.2 * -1.6 + 0.3 * 1.0 + 0.15 * -3.0 + 0.05 * 1.25 + 0.2 * -0.9
    entropy = 0.1 * 0.5 + 0.2 * 1.0 + 0.3 * 0.25 + 0.15 * 2.0 + 0.05 * 0.1 + 0.2 * 0.7
    assert loss == pytest.approx(-surrogate - 0.01 * entropy)
    assert by_logprobs == pytest.approx([0.0, 0.0, -0.3, 0.45, -0.0625, 0.18])
    assert by_entropy == pytest.approx([-0.001, -0.002, -0.003, -0.0015, -0.0005, -0.002])
    assert metrics["loss"] == pytest.approx(loss)
    assert metrics["entropy"] == pytest.approx(entropy)
    assert metrics["clip_frac"] == pytest.approx(0.1 + 0.2)
    kl = sum(weight * (token.ratio - 1 - math.log(token.ratio)) for weight, token in zip(WEIGHTS, tokens, strict=True))
    assert metrics["approx_kl"] == pytest.approx(kl)


def test_tokens_of_the_current_weights_have_ratio_one_whatever_was_recorded() -> None:
    loss, by_logprobs, _, metrics = loss_of(inputs_of(list(TOKENS.values()), is_current=True))
    advantages = [2.0, -2.0, 2.0, -2.0, 1.0, -1.0]
    products = [weight * advantage for weight, advantage in zip(WEIGHTS, advantages, strict=True)]
    assert by_logprobs == pytest.approx([-product for product in products])
    assert loss == pytest.approx(-sum(products) - ENTROPY_COEF * metrics["entropy"])
    assert metrics["clip_frac"] == 0.0
    assert metrics["approx_kl"] == pytest.approx(0.0)


def test_a_loss_is_the_sum_of_the_losses_of_its_parts() -> None:
    inputs = inputs_of(list(TOKENS.values()))
    whole, *_ = loss_of(inputs, entropy_coef=0.0)
    parts = 0.0
    for token, weight in zip(TOKENS.values(), WEIGHTS, strict=True):
        alone, *_ = loss_of(inputs_of([token]), entropy_coef=0.0)
        parts += alone / WEIGHTS[0] * weight
    assert whole == pytest.approx(parts)
