"""The section `algorithm`: which algorithm trains the policy, and its settings.

`yatt_mm.algorithms.table` says which settings an algorithm reads, and their defaults. A setting that the chosen one
does not read is refused.
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from yatt_mm.algorithms.settings import AlgorithmSettings, TokenWeights
from yatt_mm.algorithms.table import ALGORITHMS, default_of, settings_of
from yatt_mm.config.values import Section


class AlgorithmSection(Section):
    name: str = "grpo"
    """The algorithm: `grpo`, `dr_grpo`, `dapo`, `rloo`, `reinforce_plus_plus`, `gspo` or `cispo`. docs/algorithms.md
    says what each is made of. Settings without a default here have that of the algorithm; those that it does not read
    are refused."""
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
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """The weight of an entropy bonus in the loss."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in ALGORITHMS:
            (near,) = difflib.get_close_matches(name, ALGORITHMS, n=1, cutoff=0.0)
            raise ValueError(f"there is no such algorithm; did you mean {near}? There are {', '.join(ALGORITHMS)}")
        return name

    @field_validator("normalize_std", "token_weights", "clip_low", "clip_high", "dual_clip")
    @classmethod
    def _fill(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the algorithm's default for a setting without a value, and refuse a value that it does not read."""
        name, setting = info.data.get("name"), str(info.field_name)
        if name is None:  # it was refused
            return value
        if value is None:
            return default_of(name, setting)
        if setting not in settings_of(name):
            raise ValueError(f"{name} does not read it; it reads {', '.join(settings_of(name))}")
        return value

    def settings(self) -> AlgorithmSettings:
        """Return the settings as controllers and training ranks read them."""
        given = {field.name: getattr(self, field.name) for field in fields(AlgorithmSettings)}
        return AlgorithmSettings(**{name: value for name, value in given.items() if value is not None})
