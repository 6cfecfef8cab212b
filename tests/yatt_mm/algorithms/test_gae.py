"""Tests of generalised advantage estimation and of the loss of a critic, against numbers worked out by hand, against
definitions, and against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from yatt_mm.algorithms.gae import Moments, explained_variance, gae, moments_of, token_rewards
from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.algorithms.losses import value_loss
from yatt_mm.algorithms.settings import AlgorithmSettings


def test_the_last_token_gets_the_score() -> None:
    assert token_rewards(2.0, 3).tolist() == [0.0, 0.0, 2.0]
    assert token_rewards(2.0, 1).tolist() == [2.0]
    assert token_rewards(2.0, 0).tolist() == []


def test_the_advantages_of_three_tokens_are_those_worked_out_by_hand() -> None:
    # errors: 0 + 0.5 * 2 - 1 = 0, 0 + 0.5 * 4 - 2 = 0, 3 - 4 = -1; each token adds 0.5 * 0.5 of the next one's
    values = np.array([1.0, 2.0, 4.0], dtype=np.float32)
    assert gae(token_rewards(3.0, 3), values, gamma=0.5, lam=0.5).tolist() == [-0.0625, -0.25, -1.0]
    # with rewards on the way: errors 1 + 0.5 * 2 - 1 = 1, 0 + 2 - 2 = 0, 3 - 4 = -1
    rewards = np.array([1.0, 0.0, 3.0])
    assert gae(rewards, values, gamma=0.5, lam=0.5).tolist() == [1 - 0.0625, -0.25, -1.0]


def test_the_ends_of_lambda_are_the_return_and_the_next_value() -> None:
    values = np.array([0.3, -0.2, 0.9], dtype=np.float32)
    score = token_rewards(1.0, 3)
    assert gae(score, values, gamma=1.0, lam=1.0) == pytest.approx(1.0 - values.astype(float))
    assert gae(score, values, gamma=0.9, lam=1.0) == pytest.approx([0.81, 0.9, 1.0] - values.astype(float))
    assert gae(score, values, gamma=0.9, lam=0.0) == pytest.approx(
        [0.9 * -0.2 - 0.3, 0.9 * 0.9 + 0.2, 1 - 0.9], rel=1e-6
    )


def test_responses_of_one_token_and_of_none_have_advantages() -> None:
    assert gae(token_rewards(1.0, 1), np.array([0.25], np.float32), gamma=0.9, lam=0.9).tolist() == [0.75]
    assert gae(token_rewards(1.0, 0), np.array([], np.float32), gamma=0.9, lam=0.9).tolist() == []


def test_gae_is_the_weighted_mean_of_advantages_that_look_so_many_tokens_ahead() -> None:
    """Test equation 16 of the paper: (1 - lambda) sum lambda^k A^(k+1), where the last one has all the weight left."""
    random = np.random.default_rng(0)
    values, rewards = random.normal(size=6).astype(np.float32), random.normal(size=6)
    gamma, lam = 0.95, 0.7

    def looking(token: int, num_steps: int) -> float:
        end = min(len(values), token + num_steps)
        ahead = sum(gamma ** (at - token) * rewards[at] for at in range(token, end))
        return ahead + (gamma**num_steps * values[end] if end < len(values) else 0.0) - values[token]

    found = gae(rewards, values, gamma=gamma, lam=lam)
    for token in range(len(values)):
        left = len(values) - token
        steps = [(1 - lam) * lam ** (k - 1) * looking(token, k) for k in range(1, left)]
        assert found[token] == pytest.approx(sum(steps) + lam ** (left - 1) * looking(token, left))


def test_moments_count_all_replicas_and_whitened_values_have_the_mean_0_and_the_variance_1() -> None:
    mine, others = np.array([1.0, 2.0]), np.array([6.0])

    def add(values: np.ndarray) -> np.ndarray:
        """Add what the other replica has: one token, with the sum 6, and (6 - 3)^2 around the mean."""
        return values + (np.array([1.0, 6.0]) if len(values) == 2 else np.array([9.0]))

    (found,) = moments_of([mine], add)
    assert found == Moments(mean=3.0, variance=(4 + 1 + 9) / 2)
    white = found.whiten(np.concatenate([mine, others]))
    assert white == pytest.approx([-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)])
    assert moments_of([np.empty(0)], lambda values: values) == [Moments(mean=0.0, variance=0.0)]
    (one,) = moments_of([np.array([5.0])], lambda values: values)
    assert one.whiten(np.array([5.0])).tolist() == [0.0], "a single token has nothing to compare with"


def test_values_explain_the_variance_of_the_returns() -> None:
    returns = np.array([0.0, 1.0, 2.0, 3.0])

    def explained(values: np.ndarray) -> float | None:
        return explained_variance(*moments_of([returns - values, returns], lambda sums: sums))

    assert explained(returns) == 1.0
    assert explained(np.full(4, 0.7)) == pytest.approx(0.0)
    assert explained(returns / 2) == pytest.approx(0.75)
    assert explained(-returns) == pytest.approx(-3.0)
    assert explained_variance(Moments(mean=0.0, variance=0.0), Moments(mean=1.0, variance=0.0)) is None
    rounding = Moments(mean=0.3, variance=3e-33)  # what is left of scores that are all 0.3
    assert explained_variance(Moments(mean=0.0, variance=0.1), rounding) is None


CASES = {
    "moved down toward the return, past the bound: it binds": (1.1, 1.0, 1.9, 0.4**2, 0.0),
    "moved up toward the return, past the bound: it binds": (0.9, 1.0, 0.1, 0.4**2, 0.0),
    "moved up away from the return, past the bound: it does not bind": (3.0, 1.0, 0.0, 2.0**2, 2.0),
    "moved down away from the return, past the bound: it does not bind": (-1.0, 1.0, 0.4, 2.0**2, -2.0),
    "within the bounds": (0.7, 1.0, 0.6, 0.3**2, -0.3),
}
"""Value, return, old value; the square that counts, and the slope of half of it, with a clip of 0.5."""


def inputs_of(weights: list[float], returns: list[float], old_values: list[float]) -> LossInputs:
    zeros = torch.zeros(len(weights), dtype=torch.float64)
    return LossInputs(
        weights=torch.tensor(weights, dtype=torch.float64),
        advantages=zeros,
        old_logprobs=zeros,
        is_current=zeros.bool(),
        rollout_logprobs=zeros,
        old_values=torch.tensor(old_values, dtype=torch.float64),
        returns=torch.tensor(returns, dtype=torch.float64),
        sequences=torch.zeros(len(weights), dtype=torch.int64),
        num_sequences=1,
    )


@pytest.mark.parametrize("case", CASES)
def test_values_are_clipped_on_both_sides(case: str) -> None:
    value, wanted, old, square, slope = CASES[case]
    at = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    settings = AlgorithmSettings(name="ppo", value_clip=0.5)
    loss, metrics = value_loss(at, inputs_of([0.5], [wanted], [old]), settings=settings, total_weight=0.5)
    (found,) = torch.autograd.grad(loss, at)
    assert float(loss.detach()) == pytest.approx(0.5 * 0.5 * square)
    assert float(found) == pytest.approx(0.5 * slope)
    assert float(metrics["loss"]) == float(loss.detach())
    assert float(metrics["clip_frac"]) == float(slope == 0.0)


def test_tokens_have_their_weights_and_no_clip_is_a_plain_square() -> None:
    values = torch.tensor([1.0, 4.0, -1.0], dtype=torch.float64)
    inputs = inputs_of([0.2, 0.3, 0.5], [0.0, 2.0, 1.0], [100.0, -100.0, 0.0])
    loss, metrics = value_loss(values, inputs, settings=AlgorithmSettings(value_clip=math.inf))
    assert float(loss) == pytest.approx(0.5 * (0.2 * 1 + 0.3 * 4 + 0.5 * 4))
    assert float(metrics["clip_frac"]) == 0.0
    _, metrics = value_loss(values, inputs, settings=AlgorithmSettings(value_clip=0.5), total_weight=2.0)
    assert float(metrics["clip_frac"]) == pytest.approx((0.2 + 0.3) / 2), "shares of the tokens' weights"


def test_the_gradient_of_the_loss_is_that_of_finite_differences() -> None:
    random = torch.Generator().manual_seed(2)
    weights, returns, old, values = torch.randn(4, 20, dtype=torch.float64, generator=random).unbind()
    inputs = inputs_of(weights.abs().tolist(), returns.tolist(), old.tolist())
    settings, point = AlgorithmSettings(value_clip=0.5), values.clone().requires_grad_()
    loss, metrics = value_loss(point, inputs, settings=settings, total_weight=float(weights.abs().sum()))
    assert 0.1 < float(metrics["clip_frac"]) < 0.9
    (found,) = torch.autograd.grad(loss, point)
    step = 1e-6
    for token in range(20):
        move = torch.zeros(20, dtype=torch.float64)
        move[token] = step
        up, down = (value_loss(values + sign * move, inputs, settings=settings)[0] for sign in (1, -1))
        assert float(found[token]) == pytest.approx(float(up - down) / (2 * step), abs=1e-8)
