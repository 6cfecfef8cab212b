"""The table of algorithms: what each one is made of, and which settings it reads. No torch.

Left out: what all of them share (`losses.policy_loss`), and how a step's groups are chosen (`yatt_mm.batching`).
docs/adding_an_algorithm.md adds one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from yatt_mm.algorithms.advantages import (
    BatchStatistics,
    centred,
    leave_one_out,
    of_batch,
    of_group,
    scores_alone,
)
from yatt_mm.algorithms.losses import Surrogate, clipped, clipped_sequences, clipped_weight
from yatt_mm.algorithms.settings import AlgorithmSettings, TokenWeights

Advantage = Callable[[Sequence[float], BatchStatistics | None, AlgorithmSettings], list[float]]
"""(rewards of a group [G], the batch's statistics, settings) -> advantages [G]; with a critic, what the last token of
each response gets as its reward."""
Need = Literal["old_logprobs", "batch_statistics", "critic"]
"""`old_logprobs`: those under the weights at the start of the step, where a step has several updates.
`batch_statistics`: those of the rewards of all controllers. `critic`: a second model, whose values make advantages of
tokens out of the rewards of responses."""
Setting = bool | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One algorithm."""

    advantage: Advantage
    token_weights: TokenWeights
    """The default of the key `algorithm.token_weights`."""
    surrogate: Surrogate
    needs: frozenset[Need]
    reads: dict[str, Setting]
    """By name the settings that it reads, besides those that all of them read, with their defaults."""
    weighs_responses: bool = False
    """True if a ratio belongs to a whole response, of which no token may be left out."""


OLD: frozenset[Need] = frozenset({"old_logprobs"})
CLIP: dict[str, Setting] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": math.inf}
STD: dict[str, Setting] = {"normalize_std": True}

# fmt: off
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        advantage=of_group, token_weights="token_mean", surrogate=clipped, needs=OLD, reads=STD | CLIP),
    "dr_grpo": Algorithm(
        advantage=centred, token_weights="constant", surrogate=clipped, needs=OLD, reads=CLIP),
    "dapo": Algorithm(
        advantage=of_group, token_weights="token_mean", surrogate=clipped, needs=OLD,
        reads=STD | CLIP | {"clip_high": 0.28}),
    "rloo": Algorithm(
        advantage=leave_one_out, token_weights="constant", surrogate=clipped, needs=OLD, reads=CLIP),
    "reinforce_plus_plus": Algorithm(
        advantage=of_batch, token_weights="token_mean", surrogate=clipped, needs=OLD | {"batch_statistics"},
        reads=CLIP),
    "gspo": Algorithm(
        advantage=of_group, token_weights="sequence_mean", surrogate=clipped_sequences, needs=OLD,
        reads=STD | CLIP | {"clip_low": 3e-4, "clip_high": 4e-4}, weighs_responses=True),
    "cispo": Algorithm(
        advantage=of_group, token_weights="token_mean", surrogate=clipped_weight, needs=OLD,
        reads=STD | {"clip_high": 4.0}),
    "ppo": Algorithm(
        advantage=scores_alone, token_weights="token_mean", surrogate=clipped, needs=OLD | {"critic"},
        reads=CLIP | {"gamma": 1.0, "gae_lambda": 1.0, "value_clip": 0.2}),
}
# fmt: on
SHARED = (
    "min_reward_range",
    "token_weights",
    "overlong_filter",
    "overlong_buffer",
    "overlong_penalty",
    "entropy_coef",
    "kl",
    "correction",
)
"""The settings that all of them read."""


def has_critic(name: str) -> bool:
    """Return True if an algorithm trains a critic beside the policy."""
    return "critic" in ALGORITHMS[name].needs


def settings_of(name: str) -> tuple[str, ...]:
    """Return the names of all settings that an algorithm reads."""
    return (*ALGORITHMS[name].reads, *SHARED)


def default_of(name: str, setting: str) -> Setting | None:
    """Return an algorithm's default of a setting; None if it does not read it."""
    entry = ALGORITHMS[name]
    return entry.token_weights if setting == "token_weights" else entry.reads.get(setting)
