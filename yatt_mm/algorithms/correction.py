"""Engine against trainer: how much a token counts whose probability in the engine that sampled it differs from that in
the trainer.

The behaviour policy is the engine's at the moment of sampling, also for stale tokens. The proximal policy is the
trainer's at the start of the step. Their ratio corrects for both differences, numerics and age (decoupled PPO, arXiv
2505.24298, section 5.2), and the clip of the algorithm compares with the proximal policy alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.algorithms.settings import CorrectionSettings

if TYPE_CHECKING:
    import torch

READS: dict[str, dict[str, str | float]] = {
    "none": {},
    "tis": {"level": "token", "cap": 2.0, "worst_ratio": math.inf},
    "icepop": {"level": "token", "floor": 0.5, "cap": 5.0, "worst_ratio": math.inf},
}
"""By kind the settings that it reads, with their defaults."""


MAX_LOG_RATIO = 20.0
"""The largest logarithm of a ratio, up or down, that counts: 5e8."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """The correction of the sampled tokens of a microbatch. Nothing of it carries a gradient."""

    weights: torch.Tensor
    """[K] the factors of the tokens' surrogates."""
    is_cut: torch.Tensor
    """[K] bool, True where a bound binds."""
    log_ratio: torch.Tensor
    """[K] log-probability of the proximal policy minus that of the engine."""


def correct(proximal_logprobs: torch.Tensor, inputs: LossInputs, settings: CorrectionSettings) -> Corrected:
    """Return the correction for [K] log-probabilities of the proximal policy.

    Truncated importance sampling (`tis`, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", Yao
    et al., 2025) counts a ratio up to `cap`. IcePop (`icepop`, arXiv 2510.18855) leaves tokens out whose ratio is not
    in floor..cap. The ratio is that of a token, of a whole response (`sequence`), or the
    geometric mean over a response. With either, a response is left out if the ratio of one of its tokens is above
    `worst_ratio` or below its reciprocal.
    """
    log_ratio = (proximal_logprobs - inputs.rollout_logprobs).detach()
    ratio = _exp(_at_level(log_ratio, inputs, settings))
    is_cut = ratio > settings.cap
    if settings.kind == "tis":
        weights = ratio.clamp(max=settings.cap)
    else:
        is_cut = is_cut | (ratio < settings.floor)
        weights = ratio.masked_fill(is_cut, 0.0)
    if math.isfinite(settings.worst_ratio):
        is_bad = inputs.sequence_maxima(log_ratio.abs()) > math.log(settings.worst_ratio)
        is_cut, weights = is_cut | is_bad, weights.masked_fill(is_bad, 0.0)
    return Corrected(weights, is_cut, log_ratio)


def _at_level(log_ratio: torch.Tensor, inputs: LossInputs, settings: CorrectionSettings) -> torch.Tensor:
    if settings.level == "sequence":
        return inputs.sequence_sums(log_ratio)
    return inputs.sequence_means(log_ratio) if settings.level == "geometric" else log_ratio


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the ratio. It stays finite, so that neither a metric nor a weight of 0 times it is ever NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def metrics_of(corrected: Corrected, shares: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the metrics of a microbatch's correction, as sums. `shares`: [K] those of the tokens, with the sum 1 over
    the global batch. `effective_share` makes one number of the last two."""
    log_ratio, weights = corrected.log_ratio, corrected.weights
    return {
        "mismatch_k3": (shares * (_exp(log_ratio) - 1 - log_ratio)).sum(),
        "cut_frac": (shares * corrected.is_cut).sum(),
        "correction_mean": (shares * weights).sum(),
        "correction_squares": (shares * weights * weights).sum(),
    }


def effective_share(mean: float, squares: float) -> float:
    """Return the effective sample size of corrected tokens as a share of their number: 1 if all have the same
    correction (Kish's formula). `mean`, `squares`: the mean of the corrections, and of their squares."""
    return mean * mean / squares if squares else 0.0
