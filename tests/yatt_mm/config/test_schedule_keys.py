"""Tests of the keys of the learning rate: each schedule has the settings that it reads, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import dump_config, load_config
from yatt_mm.config.train_section import SCHEDULE_READS, TrainSection
from yatt_mm.protocol.adam_settings import Schedule

JUDGE = Path(__file__).parents[3] / "configs" / "judge_full_cpu.yaml"
PLAIN = {"steps": 1, "prompts_per_step": 1, "lr": 1e-3}


def test_without_a_schedule_the_keys_mean_what_they_meant() -> None:
    assert TrainSection(**PLAIN).lr_final_frac == 1.0
    assert load_config(JUDGE).train.lr_final_frac == 0.05
    assert load_config(JUDGE).train.lr_schedule is None


@pytest.mark.parametrize(
    ("schedule", "final"), [("linear", None), ("cosine_with_min_lr", 0.1), ("warmup_stable_decay", 0.0)]
)
def test_a_schedule_has_its_own_end_and_the_resolved_config_is_the_same_again(
    schedule: str, final: float | None, tmp_path: Path
) -> None:
    config = load_config(JUDGE, ["train.lr_final_frac=null", f"train.lr_schedule={schedule}", "train.warmup_steps=3"])
    assert config.train.lr_final_frac == final
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"lr_schedule": "constant", "warmup_steps": 5},
            "train.warmup_steps is 5: the schedule constant does not read it; it is a "
            "setting of constant_with_warmup, linear, cosine, "
            "cosine_with_min_lr, warmup_stable_decay",
        ),
        (
            {"lr_schedule": "cosine", "lr_final_frac": 0.1},
            "train.lr_final_frac is 0.1: the schedule cosine does not read it; it is a "
            "setting of cosine_with_min_lr, warmup_stable_decay",
        ),
        (
            {"lr_decay_steps": 5},
            "train.lr_decay_steps is 5: the rate without train.lr_schedule does not read it; it is a "
            "setting of warmup_stable_decay",
        ),
        (
            {"lr_schedule": "constant", "lr_final_frac": 0.0},
            "train.lr_final_frac is 0.0: the schedule constant does not read it; it is a "
            "setting of cosine_with_min_lr, warmup_stable_decay",
        ),
        (
            {"lr_schedule": "warmup_stable_decay", "warmup_steps": 9000, "lr_decay_steps": 9},
            "warmup_steps is 9000 and lr_decay_steps 9, together more than the ",
        ),
        ({"part_lr": {"head": 1.0}}, "train.part_lr.head is 'head': wanted 'tower', 'merger' or 'language'"),
        (
            {"part_lr": {"tower": 1e-6}, "freeze": ["tower"]},
            "part_lr and freeze both name tower, and a frozen part has no learning rate",
        ),
    ],
)
def test_what_does_not_fit_the_schedule_is_refused(keys: dict[str, object], message: str) -> None:
    overrides = [f"train.{name}={value}" for name, value in {"lr_final_frac": "null", **keys}.items()]
    with pytest.raises(ConfigError) as caught:
        load_config(JUDGE, overrides)
    assert message in str(caught.value)


def test_every_schedule_of_the_protocol_has_its_settings() -> None:
    assert set(SCHEDULE_READS) == {None, *get_args(Schedule)}
