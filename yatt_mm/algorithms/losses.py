"""The losses of the policy and of its critic as pure functions of per-token tensors.

Axes: K = sampled tokens of a microbatch, all sequences one after another, each of them whole.
Weights are normalised over the global batch by the caller, so a loss is a plain sum: it is the same number for
any split into microbatches and data-parallel ranks.

Controllers read the table of algorithms, which names these functions, and never import torch. So the functions use
tensors' methods alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from yatt_mm.algorithms.correction import correct, metrics_of
from yatt_mm.algorithms.kl import ESTIMATORS
from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.algorithms.settings import AlgorithmSettings

if TYPE_CHECKING:
    import torch


Surrogate = Callable[
    ["torch.Tensor", "torch.Tensor", LossInputs, AlgorithmSettings], tuple["torch.Tensor", "torch.Tensor"]
]
"""The type of what an algorithm maximises: (log-probabilities [K], log-ratios [K] to the old policy, inputs, settings)
-> (values [K], which carry the gradient; [K] bool, True where a clip binds)."""


def clipped(
    logprobs: torch.Tensor, log_ratio: torch.Tensor, inputs: LossInputs, settings: AlgorithmSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the clipped surrogate of PPO (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476,
    section 3.1), and with a lower bound for negative advantages (dual clip, arXiv 1912.09729)."""
    return _clip(log_ratio.exp(), inputs.advantages, settings)


def clipped_sequences(
    logprobs: torch.Tensor, log_ratio: torch.Tensor, inputs: LossInputs, settings: AlgorithmSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same for the ratio of a whole response, the geometric mean over its tokens (GSPO, arXiv 2507.18071,
    equations 5 and 7): all tokens of a response have the same value."""
    return _clip(inputs.sequence_means(log_ratio).exp(), inputs.advantages, settings)


def clipped_weight(
    logprobs: torch.Tensor, log_ratio: torch.Tensor, inputs: LossInputs, settings: AlgorithmSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return REINFORCE's log-probability times advantage, weighted by the ratio up to 1 + clip_high, which carries no
    gradient (CISPO, arXiv 2506.13585, equations 4 and 5): no token loses its gradient."""
    ratio, most = log_ratio.detach().exp(), 1 + settings.clip_high
    return ratio.clamp(max=most) * inputs.advantages * logprobs, ratio > most


def _clip(
    ratio: torch.Tensor, advantages: torch.Tensor, settings: AlgorithmSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = (ratio * advantages).minimum(clipped * advantages)
    is_clipped = ratio * advantages > clipped * advantages
    if math.isinf(settings.dual_clip):
        return surrogate, is_clipped
    bound = settings.dual_clip * advantages
    is_too_low = (advantages < 0) & (surrogate < bound)
    return bound.where(is_too_low, surrogate), is_clipped | is_too_low


def policy_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    inputs: LossInputs,
    *,
    surrogate: Surrogate,
    settings: AlgorithmSettings,
    total_weight: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of an algorithm: minus the weighted and corrected surrogate, minus the entropy bonus, plus the
    divergence from the reference.

    Args:
        logprobs: [K] log-probabilities under the current weights; carries the gradient.
        entropy: [K] entropy of the same distributions.
        inputs: what is known of the same tokens.
        total_weight: the sum of all tokens' weights over the global batch.

    Returns:
        The loss (a scalar) and weighted sums for the metrics: their weights add up to 1.
    """
    weights = inputs.weights
    old_logprobs = logprobs.detach().where(inputs.is_current, inputs.old_logprobs)
    log_ratio = logprobs - old_logprobs
    values, is_clipped = surrogate(logprobs, log_ratio, inputs, settings)
    corrected = None
    if settings.correction.kind != "none":
        corrected = correct(old_logprobs, inputs, settings.correction)
        values = corrected.weights * values
    loss = -(weights * values).sum() - settings.entropy_coef * (weights * entropy).sum()
    shares, log_ratio = weights / total_weight, log_ratio.detach()
    metrics = {} if corrected is None else metrics_of(corrected, shares)
    if settings.kl.where == "loss":
        assert inputs.reference_logprobs is not None
        divergence = ESTIMATORS[settings.kl.estimator](logprobs - inputs.reference_logprobs)
        loss = loss + settings.kl.coef * (weights * divergence).sum()
        metrics["kl"] = (shares * divergence.detach()).sum()
    metrics |= {
        "loss": loss.detach(),
        "entropy": (shares * entropy.detach()).sum(),
        "clip_frac": (shares * is_clipped).sum(),
        "approx_kl": (shares * (log_ratio.exp() - 1 - log_ratio)).sum(),
    }
    return loss, metrics


def value_loss(
    values: torch.Tensor, inputs: LossInputs, *, settings: AlgorithmSettings, total_weight: float = 1.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a critic: half the weighted square of values minus returns, or of the values within
    `value_clip` of the old ones minus returns where that is larger. A token at which the clip binds has no gradient.
    (PPO with clipped values: arXiv 2006.05990, section 3.)

    Args:
        values: [K] values under the current weights; carries the gradient.
        inputs, total_weight: as in `policy_loss`.
    """
    old, returns = inputs.old_values, inputs.returns
    assert old is not None and returns is not None
    near = values.clamp(old - settings.value_clip, old + settings.value_clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    loss = 0.5 * (inputs.weights * plain.maximum(clipped)).sum()
    shares = inputs.weights / total_weight
    return loss, {"loss": loss.detach(), "clip_frac": (shares * (clipped > plain)).sum()}
