"""The learning rate over a run: the schedules of transformers, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import get_scheduler

from yatt_mm.protocol.adam_settings import AdamSettings


def learning_rate(settings: AdamSettings) -> Callable[[int], float]:
    """Return a function from the number of updates that are done to the learning rate of the next one."""
    if settings.schedule is None:
        return settings.lr_at
    own: dict[str, Any] = {}
    if settings.schedule == "cosine_with_min_lr":
        own = {"min_lr_rate": settings.lr_final_frac}
    elif settings.schedule == "warmup_stable_decay":
        own = {"min_lr_ratio": settings.lr_final_frac, "num_decay_steps": settings.decay_updates}
    scheduler = get_scheduler(
        settings.schedule,
        torch.optim.SGD([torch.zeros(1)], lr=1.0),  # it wants one, and only its function is used
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.total_updates,
        scheduler_specific_kwargs=own,
    )
    (factor,) = scheduler.lr_lambdas
    return lambda num_updates: settings.lr * factor(num_updates)
