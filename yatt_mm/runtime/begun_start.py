"""With which begun steps a run goes on after its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from yatt_mm.common.begun_steps import BegunStep
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.config.run_config import Config
from yatt_mm.runtime.run_dir import FREE_TO_CHANGE, flat

WITHOUT_EFFECT = (
    *FREE_TO_CHANGE,
    "faults",
    "placement",
    "weights",
    "train.parallel",
    "train.max_tokens_per_microbatch",
    "train.max_patches_per_microbatch",
    "rollout.num_engines",
    "rollout.tp",
    "rollout.max_num_seqs",
    "rollout.max_groups_per_engine",
    "rollout.kv_cache_memory",
    "reward.num_workers",
)
"""The keys and sections on which responses, their rewards and the weights that sampled them do not depend."""


def find_begun(config: Config, checkpoint: Path, resume: str, tell: Callable[[str], None]) -> dict[int, BegunStep]:
    """Return [step] the begun steps after a checkpoint with which the run goes on. `resume`: what `--resume` named: a
    checkpoint that is named and is not the newest begins another path. `tell` gets lines for people."""
    step = int(checkpoint.name.removeprefix("step_"))
    checkpoints = Checkpoints(root=checkpoint.parent, keep=1)
    if resume != "auto" and step != checkpoints.steps()[-1]:
        return {}
    now, found = flat(config.model_dump(mode="json")), {}
    for begun in checkpoints.begun.after(step, tell):
        changed = sorted(key for key in _changed(flat(begun.config), now) if counts(key, config))
        if changed:
            tell(f"the responses of step {begun.step} are sampled again, because {changed[0]} has changed")
            break
        found[begun.step] = begun
    return found


def counts(key: str, config: Config) -> bool:
    """Return True if responses or weights depend on a key. On the number of steps a learning rate that falls
    depends."""
    return not key.startswith(WITHOUT_EFFECT) or (key == "train.steps" and config.train.rate_falls)


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
