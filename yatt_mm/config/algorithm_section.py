"""The sections `algorithm`, `reference` and `critic`: which algorithm trains the policy, its settings, the model near
which it keeps the policy, and the one that predicts rewards.

`yatt_mm.algorithms.table` says which settings an algorithm reads, and their defaults. A setting that the chosen one
does not read is refused.
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from yatt_mm.algorithms.correction import READS
from yatt_mm.algorithms.settings import (
    AlgorithmSettings,
    CorrectionKind,
    CorrectionLevel,
    CorrectionSettings,
    KlEstimator,
    KlSettings,
    KlWhere,
    TokenWeights,
)
from yatt_mm.algorithms.table import ALGORITHMS, default_of, settings_of
from yatt_mm.config.values import Section, filled

KL_READS: dict[KlWhere, dict[str, Any]] = {
    "none": {},
    "loss": {"estimator": "k3", "coef": 0.001},
    "reward": {"estimator": "k1", "coef": 0.001, "target": 0.0},
}
"""By place of the divergence the settings that it reads, with their defaults."""


class CorrectionSection(Section):
    kind: CorrectionKind = "none"
    """Corrects for tokens whose probabilities differ between the engine that sampled them and the trainer: not
    (`none`), by their ratio up to `cap` (`tis`, truncated importance sampling), or by leaving out those whose ratio is
    not in floor..cap (`icepop`). Ratios of the algorithm then compare with the trainer's policy at the start of the
    step, also for stale tokens."""
    level: Annotated[CorrectionLevel | None, Field(validate_default=True)] = None
    """What a ratio is of: a `token`, a whole response (`sequence`), or the `geometric` mean over a response; by default
    a token."""
    floor: Annotated[float | None, Field(ge=0, lt=1, validate_default=True)] = None
    """The lowest ratio that counts; by default 0.5 for `icepop`."""
    cap: Annotated[float | None, Field(gt=1, allow_inf_nan=True, validate_default=True)] = None
    """The highest ratio that counts; by default 2 for `tis` and 5 for `icepop`."""
    worst_ratio: Annotated[float | None, Field(gt=1, allow_inf_nan=True, validate_default=True)] = None
    """A response is left out if the ratio of one of its tokens is above this, or below one divided by it; by default
    `.inf`, which leaves none out."""

    @field_validator("level", "floor", "cap", "worst_ratio")
    @classmethod
    def _fill(cls, value: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("kind")
        return filled(value, info, f"the kind {kind}", None if kind is None else READS[kind])

    def settings(self) -> CorrectionSettings:
        """Return the settings as training ranks read them."""
        return CorrectionSettings(**{name: value for name, value in self.model_dump().items() if value is not None})


class KlSection(Section):
    where: KlWhere = "none"
    """Keeps the policy near a reference model (`reference.path`) by a penalty on their KL divergence: not (`none`), in
    the `loss` of each token, or in the `reward` of a response, from which advantages are computed."""
    estimator: Annotated[KlEstimator | None, Field(validate_default=True)] = None
    """How the divergence is estimated from a sampled token: `k1`, `k2` or `k3`; by default `k3` in the loss, which does
    not take `k1`, and `k1` in the reward. docs/algorithms.md has the formulas."""
    coef: Annotated[float | None, Field(gt=0, validate_default=True)] = None
    """The weight of the divergence; by default 0.001. With a `target` it is that of the first step."""
    target: Annotated[float | None, Field(ge=0, validate_default=True)] = None
    """With `where=reward`: the divergence per token (`train/kl`) that is wanted. After each step `coef` becomes up to
    2 % larger if the divergence is above it, and smaller if it is below; 0, the default, leaves `coef` as it is."""

    @field_validator("estimator", "coef", "target")
    @classmethod
    def _fill(cls, value: Any, info: ValidationInfo) -> Any:
        where = info.data.get("where")
        return filled(value, info, f"algorithm.kl.where={where}", None if where is None else KL_READS[where])

    @model_validator(mode="after")
    def _check_estimator(self) -> Self:
        if (self.where, self.estimator) == ("loss", "k1"):
            raise ValueError(
                "estimator is k1, whose gradient is 0 in the mean over the policy's tokens, so that in the loss it "
                "keeps nothing near the reference; choose k2 or k3"
            )
        return self

    def settings(self) -> KlSettings:
        """Return the settings as training ranks read them."""
        return KlSettings(**{name: value for name, value in self.model_dump().items() if value is not None})


class ReferenceSection(Section):
    path: str | None = None
    """The model near which `algorithm.kl` keeps the policy: a folder as in `model.path`, of the same architecture; by
    default `model.path` itself."""
    renew_every: Annotated[int, Field(ge=0)] = 0
    """The steps after which the policy takes the place of the reference, again and again; 0 for never."""


class CriticSection(Section):
    path: str | None = None
    """The model from which the critic of `algorithm.name=ppo` begins: a folder as in `model.path`, of the same
    architecture; by default `model.path` itself. Its head is not read: the head of a critic begins at 0."""
    lr: Annotated[float | None, Field(gt=0)] = None
    """The learning rate of the critic after the warm-up, in the schedule of the policy's; by default `train.lr`. Rates
    of parts (`train.part_lr`) keep their ratio to it."""


class AlgorithmSection(Section):
    name: str = "grpo"
    """The algorithm: `grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_plus_plus`, `gspo`, `cispo` or `ppo`.
    docs/algorithms.md says what each is made of. Settings without a default here have that of the algorithm; those that
    it does not read are refused."""
    normalize_std: Annotated[bool | None, Field(validate_default=True)] = None
    """True divides advantages by the standard deviation of the group's rewards; False only centres them."""
    min_reward_range: Annotated[float, Field(ge=0)] = 0.001
    """The difference between the highest and the lowest reward of a group up to which they count as equal, so that the
    noise of a judge that gives all responses the same score is not trained on."""
    token_weights: Annotated[TokenWeights | None, Field(validate_default=True)] = None
    """How sampled tokens are weighted: all tokens of an update equally (`token_mean`), all responses equally
    (`sequence_mean`), or each token as one of `rollout.max_tokens` of its response (`constant`, Dr. GRPO)."""
    overlong_filter: bool = False
    """True does not train on responses that were cut at `rollout.max_tokens` (DAPO). They still count in the advantages
    of the others."""
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """The tokens before `rollout.max_tokens` in which a response loses reward, the more the longer it is (DAPO); 0 for
    none. Advantages alone see the loss, not the metrics of rewards."""
    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0
    """The reward that a response of `rollout.max_tokens` tokens loses, if there is a buffer."""
    clip_low: Annotated[float | None, Field(gt=0, lt=1, validate_default=True)] = None
    """The lower clip: the probability ratio counts down to 1 - clip_low."""
    clip_high: Annotated[float | None, Field(gt=0, allow_inf_nan=True, validate_default=True)] = None
    """The upper clip: the probability ratio counts up to 1 + clip_high; `.inf` sets no limit."""
    dual_clip: Annotated[float | None, Field(gt=1, allow_inf_nan=True, validate_default=True)] = None
    """Where the advantage is negative, the probability ratio counts up to this (dual clip); `.inf` sets no limit."""
    gamma: Annotated[float | None, Field(gt=0, le=1, validate_default=True)] = None
    """With a critic: the discount of what comes one token later."""
    gae_lambda: Annotated[float | None, Field(ge=0, le=1, validate_default=True)] = None
    """With a critic: how far an advantage looks ahead, from the next value alone (0) to the end of the response (1)."""
    value_clip: Annotated[float | None, Field(gt=0, allow_inf_nan=True, validate_default=True)] = None
    """With a critic: the distance from the value at the start of the step up to which a new one counts in its loss;
    `.inf` sets no limit."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """The weight of an entropy bonus in the loss."""
    kl: KlSection = KlSection()
    correction: CorrectionSection = CorrectionSection()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in ALGORITHMS:
            (near,) = difflib.get_close_matches(name, ALGORITHMS, n=1, cutoff=0.0)
            raise ValueError(f"there is no such algorithm; did you mean {near}? There are {', '.join(ALGORITHMS)}")
        return name

    @field_validator(
        "normalize_std", "token_weights", "clip_low", "clip_high", "dual_clip", "gamma", "gae_lambda", "value_clip"
    )
    @classmethod
    def _fill(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.data.get("name")
        reads = None if name is None else {setting: default_of(name, setting) for setting in settings_of(name)}
        return filled(value, info, str(name), reads)

    @model_validator(mode="after")
    def _check_penalty(self) -> Self:
        if self.overlong_penalty != 1 and not self.overlong_buffer:
            raise ValueError(f"overlong_penalty is {self.overlong_penalty:g}, but overlong_buffer is 0: set both")
        return self

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        correction = self.correction
        if ALGORITHMS[self.name].weighs_responses and (correction.kind, correction.level) == ("icepop", "token"):
            raise ValueError(
                f"correction.level is token, so icepop leaves single tokens out of a response, and {self.name} weighs "
                "responses as a whole; set correction.level to sequence or geometric, with a floor and a cap for it"
            )
        return self

    def settings(self) -> AlgorithmSettings:
        """Return the settings as controllers and training ranks read them."""
        given = {field.name: getattr(self, field.name) for field in fields(AlgorithmSettings)}
        given |= {"kl": self.kl.settings(), "correction": self.correction.settings()}
        return AlgorithmSettings(**{name: value for name, value in given.items() if value is not None})
