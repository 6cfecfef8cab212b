"""Whether a run has anything to learn from: it is told when its steps have no signal, and it fails if none had any, or
if a judge never gave a verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from yatt_mm.common.errors import RewardError

MANY_STEPS = 3
"""The number of steps in a row without signal after which people are told."""
WHAT_TO_LOOK_AT = (
    "look at the rewards: reward.function may always return the same number, it and the judges may not understand the "
    "responses, the model may never be right (or always), or it may always say the same (rollout.temperature)"
)
JUDGE_FAILED = re.compile(r"genrm/(\w+)_failed_frac$")
"""The metric with the share of responses to which a judge gave no verdict."""


class LearningWatch:
    """The steps of a run, and whether a group of theirs had two different rewards: GRPO compares the responses of a
    group, and learns nothing from equal ones."""

    def __init__(self, *, min_reward_range: float) -> None:
        """`min_reward_range`: the difference up to which rewards count as equal."""
        self._min_range = min_reward_range
        self._num_steps = 0
        self._num_with_signal = 0
        self._num_in_a_row = 0
        self._mean = 0.0
        self._least_failed: dict[str, float] = {}
        """The lowest share without a verdict, of all steps, by judge."""

    def take(self, record: Mapping[str, Any]) -> str:
        """Take the record of a step. Return a warning, or an empty text."""
        if "reward/has_advantage_frac" not in record:
            return ""  # the evaluation before the first step
        self._num_steps += 1
        for key, share in record.items():
            if judge := JUDGE_FAILED.match(key):
                self._least_failed[judge[1]] = min(share, self._least_failed.get(judge[1], 1.0))
        self._mean = record["reward/mean"]
        if record["reward/has_advantage_frac"] > 0:
            self._num_with_signal += 1
            self._num_in_a_row = 0
            return ""
        self._num_in_a_row += 1
        if self._num_in_a_row != MANY_STEPS:
            return ""
        return f"in the last {MANY_STEPS} steps {self._nothing()}; {WHAT_TO_LOOK_AT}"

    def finish(self) -> None:
        """Check, at the end of a run, that something was learned from, and that each judge took part.

        Raises:
            RewardError: no step had signal, or a judge gave no verdict at all.
        """
        for judge, share in self._least_failed.items():
            if share == 1:
                raise RewardError(
                    f"judge {judge} gave no verdict in {self._num_steps} steps, so each response scored "
                    f"reward.judges.{judge}.score_on_failure instead; the first line with 'no score' says why"
                )
        if self._num_steps and not self._num_with_signal:
            raise RewardError(f"nothing was learned: in {self._num_steps} steps {self._nothing()}; {WHAT_TO_LOOK_AT}")

    def _nothing(self) -> str:
        least = f"by more than algorithm.min_reward_range ({self._min_range:g})" if self._min_range else "at all"
        return f"no group had two rewards that differ {least}, and the mean was {self._mean:.3g}"
