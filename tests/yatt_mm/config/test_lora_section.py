"""Tests of the keys of LoRA: what they make, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.freeze import PARTS
from models.lora.settings import LoraSettings
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import dump_config, load_config
from yatt_mm.config.train_section import PARTS as NAMED

CONFIGS = Path(__file__).parents[3] / "configs"
PLAIN, LORA = CONFIGS / "digits_cpu.yaml", CONFIGS / "digits_lora_cpu.yaml"


def test_without_a_rank_all_weights_are_trained() -> None:
    assert load_config(PLAIN).train.lora.settings() is None


def test_the_example_has_adapters_of_rank_8_and_its_resolved_config_is_the_same_again(tmp_path: Path) -> None:
    config = load_config(LORA)
    wanted = LoraSettings(rank=8, alpha=16.0, targets=("language", "tower", "merger"))
    assert config.train.lora.settings() == wanted
    assert wanted.scale == 2 and wanted.parts == set(PARTS)
    for given in (config, load_config(PLAIN)):
        (tmp_path / "resolved.yaml").write_text(dump_config(given))
        assert load_config(tmp_path / "resolved.yaml") == given


def test_the_default_is_the_language_model() -> None:
    settings = load_config(PLAIN, ["train.lora.rank=4"]).train.lora.settings()
    assert settings == LoraSettings(rank=4, alpha=16.0, targets=("language",))
    assert settings.parts == {"language"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lora.alpha=8"], "alpha is given, and rank is 0, which trains all weights; set rank, such as 8"),
        (["train.lora.rank=-1"], "train.lora.rank is -1"),
        (["train.lora.rank=8", "train.lora.targets=[]"], "train.lora.targets"),
        (
            ["train.lora.rank=8", "train.lora.targets=[q_proj]"],
            "q_proj does not begin with a part of the model; write language.q_proj, tower.q_proj or merger.q_proj",
        ),
        (
            ["train.lora.rank=8", "train.freeze=[tower]"],
            "freeze names tower, and lora freezes all weights; leave freeze out, and name in lora.targets",
        ),
        (
            ["train.lora.rank=8", "train.part_lr={tower: 1e-5}"],
            "part_lr names tower, in which lora.targets has no layer",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PLAIN, overrides)
    assert message in str(caught.value)


def test_a_part_with_adapters_may_have_a_rate_of_its_own() -> None:
    overrides = ["train.lora.rank=8", "train.lora.targets=[language, tower.qkv]", "train.part_lr={tower: 1e-5}"]
    assert load_config(PLAIN, overrides).train.part_lr == {"tower": 1e-5}


def test_the_parts_of_the_config_are_those_of_models() -> None:
    assert set(NAMED) == set(PARTS)


def test_the_rate_of_a_critic_beside_adapters_must_be_given() -> None:
    ppo = ["algorithm.name=ppo", "algorithm.clip_high=null"]
    with pytest.raises(ConfigError, match=r"critic.lr is not set, and train.lr \(0.005\) is that of LoRA's adapters"):
        load_config(LORA, ppo)
    assert load_config(LORA, [*ppo, "critic.lr=5e-4"]).critic.lr == 5e-4
