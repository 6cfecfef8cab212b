"""The settings of an algorithm, as controllers and training ranks read them. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

TokenWeights = Literal["token_mean", "sequence_mean", "constant"]
"""How the tokens of an update are weighted; see `token_weights.py`."""

KlEstimator = Literal["k1", "k2", "k3"]
KlWhere = Literal["none", "loss", "reward"]
CorrectionKind = Literal["none", "tis", "icepop"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """The settings of the correction of engine against trainer; see `correction.py`."""

    kind: CorrectionKind = "none"
    level: CorrectionLevel = "token"
    """What a ratio is of: a token, a whole response, or the geometric mean over a response."""
    floor: float = 0.0
    """The lowest ratio that counts."""
    cap: float = math.inf
    """The highest ratio that counts."""
    worst_ratio: float = math.inf
    """The ratio of a token from which on its whole response is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlSettings:
    """The settings of the KL divergence from the reference; see `kl.py`."""

    where: KlWhere = "none"
    """Where it counts: nowhere, in the loss, or in the reward."""
    estimator: KlEstimator = "k3"
    coef: float = 0.0
    """The weight of the divergence in the loss or the reward, in the first step if it has a target."""
    target: float = 0.0
    """The divergence per token towards which `coef` moves the policy; 0 leaves `coef` as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """The settings of one algorithm. `table.py` says which of them it reads; the others have no effect."""

    name: str = "grpo"
    """The entry of `table.ALGORITHMS`."""
    min_reward_range: float = 0.0
    """The difference between rewards up to which they count as equal."""
    normalize_std: bool = True
    """True divides the advantages of a group by the standard deviation of its rewards."""
    token_weights: TokenWeights = "token_mean"
    overlong_filter: bool = False
    """True gives responses that were cut at `rollout.max_tokens` no weight."""
    overlong_buffer: int = 0
    """The number of tokens before `rollout.max_tokens` in which the reward falls; 0 for none."""
    overlong_penalty: float = 1.0
    """The reward that a response of `rollout.max_tokens` loses then."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = math.inf
    """The largest ratio that counts where the advantage is negative."""
    gamma: float = 1.0
    """The discount of the next token's value; see `gae.py`."""
    gae_lambda: float = 1.0
    """How far advantages look ahead: 0 to the next value alone, 1 to the end of the response."""
    value_clip: float = math.inf
    """The distance from the old value up to which a new one counts in the loss of the critic."""
    entropy_coef: float = 0.0
    kl: KlSettings = field(default_factory=KlSettings)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
