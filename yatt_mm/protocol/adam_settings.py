"""The settings of the optimizer. Free of torch, because controllers send them to training ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from models.freeze import Part

Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "warmup_stable_decay"]
"""The names of schedules of the learning rate, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """AdamW and its learning rate over the run."""

    lr: float
    weight_decay: float
    """The weight decay of AdamW. Biases and the weights of norms are not decayed."""
    betas: tuple[float, float]
    clip_grad: float
    """The largest norm of the global gradient; 0 turns clipping off."""
    warmup_steps: int = 0
    """The number of updates over which the learning rate rises linearly to `lr`."""
    total_updates: int = 0
    """The number of updates of the whole run, over which the learning rate falls linearly; 0 keeps it constant."""
    lr_final_frac: float = 1.0
    """The learning rate of the last update, as a share of `lr`."""
    schedule: Schedule | None = None
    """The schedule of the learning rate. None is the linear one of `lr_at`, which falls during the warm-up too."""
    decay_updates: int = 0
    """The updates at the end over which `warmup_stable_decay` falls."""
    part_lr: Mapping[Part, float] = field(default_factory=dict)
    """The learning rates of parts of the model in the place of `lr`, in the same schedule."""
    offload_frac: float = 0.0
    """The share of the optimizer state that stays, and is updated, in host memory. Needs a GPU."""

    def lr_at(self, num_updates: int) -> float:
        """Return the learning rate of the update that follows `num_updates` others, without a named schedule."""
        progress = min(1.0, num_updates / (self.total_updates - 1)) if self.total_updates > 1 else 0.0
        warm = min(1.0, (num_updates + 1) / max(1, self.warmup_steps))
        return self.lr * warm * (1 - (1 - self.lr_final_frac) * progress)
