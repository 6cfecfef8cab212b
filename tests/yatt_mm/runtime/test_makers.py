"""Tests of what the actors of a run are made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from yatt_mm.config.run_config import load_config
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.runtime.makers import critic_spec

DIGITS = Path(__file__).parents[3] / "configs" / "digits_cpu.yaml"
OPTIM = AdamSettings(
    lr=2e-4, weight_decay=0.1, betas=(0.9, 0.95), clip_grad=1.0, warmup_steps=7, part_lr={"tower": 1e-4}
)


def test_a_critic_learns_like_the_policy_unless_it_has_a_rate_of_its_own() -> None:
    assert critic_spec(load_config(DIGITS), OPTIM) is None
    ppo = load_config(DIGITS, ["algorithm.name=ppo"])
    bare = critic_spec(ppo, OPTIM)
    assert bare is not None and bare.optim == OPTIM
    assert bare.model_dir == str(Path(ppo.model.path).absolute())
    own = critic_spec(load_config(DIGITS, ["algorithm.name=ppo", "critic={path: models/sft, lr: 1e-3}"]), OPTIM)
    assert own is not None and own.model_dir == str(Path("models/sft").absolute())
    assert (own.optim.lr, own.optim.warmup_steps) == (1e-3, 7)
    assert own.optim.part_lr == pytest.approx({"tower": 5e-4}), "half of it, as in the policy"
