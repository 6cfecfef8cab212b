"""The settings of the optimizer. Free of torch, because controllers send them to training ranks."""

from __future__ import annotations

from dataclasses import dataclass


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
    offload_frac: float = 0.0
    """The share of the optimizer state that stays, and is updated, in host memory. Needs a GPU."""

    def lr_at(self, num_updates: int) -> float:
        """Return the learning rate of the update that follows `num_updates` others."""
        progress = min(1.0, num_updates / (self.total_updates - 1)) if self.total_updates > 1 else 0.0
        warm = min(1.0, (num_updates + 1) / max(1, self.warmup_steps))
        return self.lr * warm * (1 - (1 - self.lr_final_frac) * progress)
