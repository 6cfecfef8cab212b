"""What a user chooses about the optimizer's updates. Free of torch: controllers send it to training ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """AdamW, and its learning rate over the run."""

    lr: float
    weight_decay: float
    """Not applied to biases and norms."""
    betas: tuple[float, float]
    clip_grad: float
    """Largest norm of the global gradient; 0 leaves it as it is."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly to `lr`."""
    total_updates: int = 0
    """Updates of the whole run, over which the learning rate falls linearly; 0 keeps it."""
    lr_final_frac: float = 1.0
    """Share of `lr` that the last update has."""
    offload_frac: float = 0.0
    """Share of the state that stays, and is updated, in host memory. Needs a GPU."""

    def lr_at(self, num_updates: int) -> float:
        """Learning rate of the update that follows `num_updates` others."""
        progress = min(1.0, num_updates / (self.total_updates - 1)) if self.total_updates > 1 else 0.0
        warm = min(1.0, (num_updates + 1) / max(1, self.warmup_steps))
        return self.lr * warm * (1 - (1 - self.lr_final_frac) * progress)
