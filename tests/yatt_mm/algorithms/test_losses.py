"""Tests of the policy losses against values and gradients that were worked out by hand, and against finite
differences."""

import math
from typing import Any, NamedTuple

import pytest
import torch

from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.algorithms.losses import Surrogate, clipped, clipped_sequences, clipped_weight, policy_loss
from yatt_mm.algorithms.settings import AlgorithmSettings
from yatt_mm.algorithms.table import ALGORITHMS

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
ENTROPIES = [0.5, 1.0, 0.25, 2.0, 0.1, 0.7, 0.0, 0.0]
LOGPROB = -1.0


def inputs_of(
    ratios: list[float],
    advantages: list[float],
    *,
    weights: list[float] | None = None,
    is_current: bool = False,
    lengths: list[int] | None = None,
) -> LossInputs:
    """Return the inputs that give each token its ratio, if its log-probability is `LOGPROB` now.

    `lengths`: those of the responses; by default each token is one."""
    num = len(ratios)
    lengths = lengths or [1] * num
    return LossInputs(
        weights=torch.tensor(weights or WEIGHTS[:num], dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        old_logprobs=torch.tensor([LOGPROB - math.log(ratio) for ratio in ratios], dtype=torch.float64),
        is_current=torch.full((num,), is_current),
        rollout_logprobs=torch.zeros(num, dtype=torch.float64),
        sequences=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
    )


def inputs_of_tokens(tokens: list[Token], is_current: bool = False) -> LossInputs:
    return inputs_of([token.ratio for token in tokens], [token.advantage for token in tokens], is_current=is_current)


def loss_of(
    inputs: LossInputs,
    entropy_coef: float = ENTROPY_COEF,
    surrogate: Surrogate = clipped,
    total_weight: float = 1.0,
    **settings: Any,
) -> tuple[float, list[float], list[float], dict[str, float]]:
    """Return the loss, its gradients by the log-probabilities and by the entropies, and the metrics."""
    num = len(inputs.weights)
    logprobs = torch.full((num,), LOGPROB, dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor(ENTROPIES[:num], dtype=torch.float64, requires_grad=True)
    given = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH} | settings
    loss, metrics = policy_loss(
        logprobs,
        entropy,
        inputs,
        surrogate=surrogate,
        settings=AlgorithmSettings(entropy_coef=entropy_coef, **given),
        total_weight=total_weight,
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
    loss, by_logprobs, by_entropy, _ = loss_of(inputs_of_tokens([token]))
    weight, entropy = WEIGHTS[0], ENTROPIES[0]
    assert loss == pytest.approx(-weight * token.surrogate - ENTROPY_COEF * weight * entropy)
    assert by_logprobs == pytest.approx([-weight * token.slope])
    assert by_entropy == pytest.approx([-ENTROPY_COEF * weight])


def test_all_tokens_add_up_with_their_weights_and_so_do_the_metrics() -> None:
    tokens = list(TOKENS.values())
    loss, by_logprobs, by_entropy, metrics = loss_of(inputs_of_tokens(tokens))
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


def test_weights_that_add_up_to_less_than_one_give_metrics_that_are_still_means() -> None:
    tokens = list(TOKENS.values())
    wanted_loss, _, _, wanted = loss_of(inputs_of_tokens(tokens))
    halves = inputs_of(
        [token.ratio for token in tokens],
        [token.advantage for token in tokens],
        weights=[weight / 2 for weight in WEIGHTS],
    )
    loss, _, _, metrics = loss_of(halves, total_weight=0.5)
    assert loss == metrics["loss"] == pytest.approx(wanted_loss / 2)
    for name in ("entropy", "clip_frac", "approx_kl"):
        assert metrics[name] == pytest.approx(wanted[name])


def test_tokens_of_the_current_weights_have_ratio_one_whatever_was_recorded() -> None:
    loss, by_logprobs, _, metrics = loss_of(inputs_of_tokens(list(TOKENS.values()), is_current=True))
    advantages = [2.0, -2.0, 2.0, -2.0, 1.0, -1.0]
    products = [weight * advantage for weight, advantage in zip(WEIGHTS, advantages, strict=True)]
    assert by_logprobs == pytest.approx([-product for product in products])
    assert loss == pytest.approx(-sum(products) - ENTROPY_COEF * metrics["entropy"])
    assert metrics["clip_frac"] == 0.0
    assert metrics["approx_kl"] == pytest.approx(0.0)


def test_a_loss_is_the_sum_of_the_losses_of_its_parts() -> None:
    inputs = inputs_of_tokens(list(TOKENS.values()))
    whole, *_ = loss_of(inputs, entropy_coef=0.0)
    parts = 0.0
    for token, weight in zip(TOKENS.values(), WEIGHTS, strict=True):
        alone, *_ = loss_of(inputs_of_tokens([token]), entropy_coef=0.0)
        parts += alone / WEIGHTS[0] * weight
    assert whole == pytest.approx(parts)


@pytest.mark.parametrize(
    ("token", "is_clipped"),
    [
        (Token(4.0, -2.0, 3.0 * -2, 0.0), True),  # far more likely although it was bad: the dual clip binds
        (Token(2.5, -2.0, 2.5 * -2, 2.5 * -2), False),
        (Token(0.5, -2.0, 0.8 * -2, 0.0), True),  # the lower clip still binds
        (Token(4.0, 2.0, 1.28 * 2, 0.0), True),  # a positive advantage has the upper clip alone
        (Token(0.5, 2.0, 0.5 * 2, 0.5 * 2), False),
    ],
)
def test_a_dual_clip_bounds_the_ratio_where_the_advantage_is_negative(token: Token, is_clipped: bool) -> None:
    loss, by_logprobs, _, metrics = loss_of(inputs_of_tokens([token]), entropy_coef=0.0, dual_clip=3.0)
    assert loss == pytest.approx(-0.1 * token.surrogate)
    assert by_logprobs == pytest.approx([-0.1 * token.slope])
    assert metrics["clip_frac"] == pytest.approx(0.1 * is_clipped)


def test_a_response_has_the_geometric_mean_of_its_tokens_ratios() -> None:
    # The ratios are sqrt(2 * 0.72) = 1.2 and sqrt(4 * 1) = 2, which is clipped, and (1/8)^(1/3) = 0.5 of a bad
    # response, which is clipped too. The fourth response is a token whose ratio of 0.9 is between the bounds.
    inputs = inputs_of(
        [2.0, 0.72, 4.0, 1.0, 0.125, 1.0, 1.0, 0.9],
        [3.0, 3.0, 1.0, 1.0, -2.0, -2.0, -2.0, -1.0],
        weights=[0.1, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2],
        lengths=[2, 2, 3, 1],
    )
    loss, by_logprobs, _, metrics = loss_of(inputs, entropy_coef=0.0, surrogate=clipped_sequences)
    assert loss == pytest.approx(-(0.3 * 1.2 * 3 + 0.2 * 1.28 * 1 + 0.3 * 0.8 * -2 + 0.2 * 0.9 * -1))
    # the response's weight of 0.3, its ratio and its advantage, divided among its two tokens
    slope = 0.3 * 1.2 * 3 / 2
    assert by_logprobs == pytest.approx([-slope, -slope, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2 * 0.9])
    assert metrics["clip_frac"] == pytest.approx(0.2 + 0.3)


def test_a_clipped_weight_keeps_the_gradient_of_every_token() -> None:
    # 1.5 is cut to 1.28, whatever the sign of the advantage; there is no lower bound
    inputs = inputs_of([1.5, 1.5, 0.5, 1.2], [2.0, -2.0, -2.0, 1.0], weights=[0.1, 0.2, 0.3, 0.4])
    loss, by_logprobs, _, metrics = loss_of(inputs, entropy_coef=0.0, surrogate=clipped_weight)
    slopes = [0.1 * 1.28 * 2, 0.2 * 1.28 * -2, 0.3 * 0.5 * -2, 0.4 * 1.2]
    assert loss == pytest.approx(-sum(slopes) * LOGPROB)
    assert by_logprobs == pytest.approx([-slope for slope in slopes])
    assert metrics["clip_frac"] == pytest.approx(0.1 + 0.2)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    surrogate = ALGORITHMS[name].surrogate
    lengths = [3, 1, 4]
    random = torch.Generator().manual_seed(1)
    weights, advantages, entropy, old, now = (
        torch.randn(8, dtype=torch.float64, generator=random) * 0.4 for _ in range(5)
    )
    settings = AlgorithmSettings(name=name, clip_low=0.2, clip_high=0.28, dual_clip=1.6, entropy_coef=0.1)
    inputs = LossInputs(
        weights=weights.abs(),
        advantages=advantages,
        old_logprobs=old - 1,
        is_current=torch.tensor([False] * 8),
        rollout_logprobs=old,
        sequences=torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)),
        num_sequences=3,
    )

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, weigher: torch.Tensor) -> torch.Tensor:
        """Return the loss, with the ratios that have no gradient at `weigher`."""
        if surrogate is not clipped_weight:
            return policy_loss(logprobs, entropy, inputs, surrogate=surrogate, settings=settings)[0]
        ratios = (weigher - inputs.old_logprobs).exp().clamp(max=1.28)
        bonus = settings.entropy_coef * (inputs.weights * entropy).sum()
        return -(inputs.weights * ratios * advantages * logprobs).sum() - bonus

    point = (now - 1).requires_grad_()
    entropies = entropy.requires_grad_()
    found, *_ = policy_loss(point, entropies, inputs, surrogate=surrogate, settings=settings)
    by_logprobs, by_entropy = torch.autograd.grad(found, [point, entropies])
    step = 1e-6
    for token in range(8):
        move = torch.zeros(8, dtype=torch.float64)
        move[token] = step
        fixed, here, there = point.detach(), point.detach(), entropies.detach()
        slope = (loss(here + move, there, fixed) - loss(here - move, there, fixed)) / (2 * step)
        assert float(by_logprobs[token]) == pytest.approx(float(slope), abs=1e-8)
        slope = (loss(here, there + move, fixed) - loss(here, there - move, fixed)) / (2 * step)
        assert float(by_entropy[token]) == pytest.approx(float(slope), abs=1e-8)
