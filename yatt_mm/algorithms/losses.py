"""Policy losses as pure functions of per-token tensors.

Axes: K = sampled tokens of a microbatch, all sequences one after another.
Weights are normalised over the global batch by the caller, so a loss is a plain sum: it is the same number for
any split into microbatches and data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss needs of the sampled tokens besides the model's outputs."""

    weights: torch.Tensor
    """[K] float32, with sum 1 over the global batch."""
    advantages: torch.Tensor
    """[K] float32."""
    old_logprobs: torch.Tensor
    """[K] float32 log-probabilities under the behaviour policy: the weights at the start of the step, or the older ones
    that sampled the token. Only those count where `is_current` is False."""
    is_current: torch.Tensor
    """[K] bool, True where the behaviour policy is the current one."""


def clipped_policy_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    entropy_coef: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the clipped surrogate of PPO (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476).

    Args:
        logprobs: [K] log-probabilities under the current weights; carries the gradient.
        entropy: [K] entropy of the same distributions.
        inputs: what is known of the same tokens.

    Returns:
        The loss (a scalar) and weighted sums for the metrics.
    """
    advantages, weights = inputs.advantages, inputs.weights
    old_logprobs = torch.where(inputs.is_current, logprobs.detach(), inputs.old_logprobs)
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(weights * surrogate).sum() - entropy_coef * (weights * entropy).sum()
    is_clipped = ratio * advantages > clipped * advantages
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "entropy": (weights * entropy).sum(),
            "clip_frac": (weights * is_clipped).sum(),
            "approx_kl": (weights * (ratio - 1 - log_ratio)).sum(),
        }
    return loss, metrics
