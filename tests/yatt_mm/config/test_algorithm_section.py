"""Tests of the section `algorithm`: each algorithm has the settings that it reads, and no others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest

from yatt_mm.algorithms.settings import AlgorithmSettings, CorrectionSettings, KlSettings, TokenWeights
from yatt_mm.algorithms.table import ALGORITHMS, settings_of
from yatt_mm.common.errors import ConfigError
from yatt_mm.common.reference_folders import ReferenceFolders
from yatt_mm.config.algorithm_section import AlgorithmSection
from yatt_mm.config.run_config import Config, dump_config, load_config

ROOT = Path(__file__).parents[3]
DIGITS = ROOT / "configs" / "digits_cpu.yaml"


def algorithm(*overrides: str, path: Path = DIGITS) -> AlgorithmSection:
    return load_config(path, overrides).algorithm


def test_what_there_was_before_there_were_names_means_what_it_meant() -> None:
    bare = AlgorithmSection()
    assert (bare.name, bare.normalize_std, bare.token_weights) == ("grpo", True, "token_mean")
    assert (bare.clip_low, bare.clip_high, bare.min_reward_range, bare.entropy_coef) == (0.2, 0.2, 0.001, 0.0)
    digits = algorithm("algorithm.normalize_std=false").settings()
    assert (digits.normalize_std, digits.clip_low, digits.clip_high, digits.entropy_coef) == (False, 0.2, 0.28, 0.005)


WANTED = {
    "grpo": {"token_weights": "token_mean", "clip_low": 0.2, "clip_high": 0.2, "normalize_std": True},
    "dr_grpo": {"token_weights": "constant", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"token_weights": "token_mean", "clip_low": 0.2, "clip_high": 0.28, "normalize_std": True},
    "rloo": {"token_weights": "constant", "clip_low": 0.2, "clip_high": 0.2},
    "reinforce_plus_plus": {"token_weights": "token_mean", "clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"token_weights": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4, "normalize_std": True},
    "cispo": {"token_weights": "token_mean", "clip_high": 4.0, "dual_clip": None, "normalize_std": True},
    "ppo": {
        "token_weights": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "value_clip": 0.2,
    },
}
"""[algorithm] the settings that it reads by default, written by hand. `dual_clip` is infinite unless it is named here;
the other settings that are not named are not read."""


def test_no_algorithm_is_without_its_values_here() -> None:
    assert WANTED.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("name", WANTED)
def test_the_name_alone_fills_in_what_the_algorithm_reads_and_the_resolved_config_is_the_same_again(
    name: str, tmp_path: Path
) -> None:
    config = load_config(DIGITS, [f"algorithm={{name: {name}}}"])
    found = config.algorithm.model_dump()
    wanted = {"dual_clip": math.inf} | WANTED[name]
    of_some = ("normalize_std", "clip_low", "clip_high", "dual_clip", "gamma", "gae_lambda", "value_clip")
    for setting in ("token_weights", *of_some):
        assert found[setting] == wanted.get(setting), setting
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    settings = config.algorithm.settings()
    assert settings.name == name and settings.token_weights in get_args(TokenWeights)


def test_a_setting_that_the_algorithm_does_not_read_is_refused_with_those_that_it_reads() -> None:
    with pytest.raises(ConfigError) as caught:
        algorithm("algorithm.name=dr_grpo", "algorithm.normalize_std=false")
    assert str(caught.value) == (
        "algorithm.normalize_std is False: dr_grpo does not read it; it reads clip_low, clip_high, dual_clip, "
        "min_reward_range, token_weights, overlong_filter, overlong_buffer, overlong_penalty, entropy_coef, kl, "
        "correction"
    )
    with pytest.raises(ConfigError, match=r"^algorithm\.dual_clip is 3: cispo does not read it; it reads normalize_"):
        algorithm("algorithm.name=cispo", "algorithm.dual_clip=3")


def test_a_penalty_without_a_buffer_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlong_penalty is 3, but overlong_buffer is 0: set both"):
        algorithm("algorithm.overlong_penalty=3")


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        ConfigError, match=r"^algorithm\.name is 'grpoo': there is no such algorithm; did you mean grpo\?"
    ):
        algorithm("algorithm.name=grpoo")
    with pytest.raises(ConfigError, match=r"did you mean reinforce_plus_plus\? There are grpo, dr_grpo, "):
        algorithm("algorithm.name=reinforce++")


def test_every_setting_of_the_table_is_a_key_and_a_setting() -> None:
    keys, settings = set(AlgorithmSection.model_fields), set(AlgorithmSettings.__slots__)
    for name in ALGORITHMS:
        assert set(settings_of(name)) <= keys & settings
    assert {"name", *(setting for name in ALGORITHMS for setting in settings_of(name))} == keys == settings
    documented = str(AlgorithmSection.model_fields["name"].description)
    assert all(f"`{name}`" in documented for name in ALGORITHMS)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*_cpu.yaml")), ids=lambda path: path.name)
def test_the_configs_of_the_project_train_with_grpo(path: Path) -> None:
    config: Config = load_config(path)
    assert config.algorithm.settings() == AlgorithmSettings(
        min_reward_range=0.001, clip_high=0.28, entropy_coef=config.algorithm.entropy_coef
    )


def test_a_correction_has_the_settings_of_its_kind_and_no_others(tmp_path: Path) -> None:
    bare = algorithm("algorithm.correction.kind=icepop").settings().correction
    assert bare == CorrectionSettings(kind="icepop", level="token", floor=0.5, cap=5.0)
    config = load_config(DIGITS, ["algorithm.correction={kind: tis, level: sequence, worst_ratio: 100}"])
    assert config.algorithm.settings().correction == CorrectionSettings(
        kind="tis", level="sequence", cap=2.0, worst_ratio=100.0
    )
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    with pytest.raises(ConfigError) as caught:
        algorithm("algorithm.correction={kind: tis, floor: 0.1}")
    assert str(caught.value) == (
        "algorithm.correction.floor is 0.1: the kind tis does not read it; it reads level, cap, worst_ratio"
    )
    with pytest.raises(
        ConfigError, match=r"^algorithm.correction.cap is 3: the kind none does not read it, and no other"
    ):
        algorithm("algorithm.correction.cap=3")
    with pytest.raises(ConfigError, match=r"^algorithm.correction.kind is 'popcorn': wanted 'none', 'tis' or 'icepop'"):
        algorithm("algorithm.correction.kind=popcorn")


def test_a_divergence_has_defaults_where_it_counts_and_nothing_where_it_does_not() -> None:
    assert algorithm().settings().kl == KlSettings()
    assert algorithm("algorithm.kl.where=loss").settings().kl == KlSettings(where="loss", estimator="k3", coef=0.001)
    given = algorithm("algorithm.kl={where: loss, estimator: k2, coef: 0.04}").settings().kl
    assert given == KlSettings(where="loss", estimator="k2", coef=0.04)
    with pytest.raises(
        ConfigError, match=r"^algorithm.kl.coef is 0.1: algorithm.kl.where=none does not read it, and no"
    ):
        algorithm("algorithm.kl.coef=0.1")
    with pytest.raises(ConfigError, match=r"algorithm.kl.* estimator is k1, whose gradient is 0 in the mean"):
        algorithm("algorithm.kl={where: loss, estimator: k1}")
    with pytest.raises(ConfigError, match=r"^algorithm.kl.where is 'rewards': wanted 'none', 'loss' or 'reward'"):
        algorithm("algorithm.kl.where=rewards")
    given = algorithm("algorithm.kl={where: reward, target: 0.1}").settings().kl
    assert given == KlSettings(where="reward", estimator="k1", coef=0.001, target=0.1)
    with pytest.raises(ConfigError, match=r"^algorithm.kl.target is 0.1: algorithm.kl.where=loss does not read it; it"):
        algorithm("algorithm.kl={where: loss, target: 0.1}")


def test_the_reference_is_the_model_itself_unless_another_is_named() -> None:
    assert load_config(DIGITS).references is None
    loss, run_dir = "algorithm.kl.where=loss", load_config(DIGITS).run_dir.absolute()
    bare = load_config(DIGITS, [loss]).references
    assert bare == ReferenceFolders(
        first=Path(load_config(DIGITS).model.path).absolute(), renewed=run_dir / "reference"
    )
    named = load_config(DIGITS, [loss, "reference.path=models/sft", "reference.renew_every=10"]).references
    assert named == ReferenceFolders(first=Path("models/sft").absolute(), renewed=run_dir / "reference", every=10)


def test_an_algorithm_with_a_critic_has_a_model_for_it_and_the_others_have_none() -> None:
    bare = load_config(DIGITS)
    assert bare.critic_path is None
    assert bare.algorithm.settings() == AlgorithmSettings(min_reward_range=0.001, clip_high=0.28, entropy_coef=0.005)
    ppo = load_config(DIGITS, ["algorithm.name=ppo"])
    assert ppo.critic_path == ppo.model.path
    found = ppo.algorithm.settings()
    assert (found.gamma, found.gae_lambda, found.value_clip, found.clip_low) == (1.0, 1.0, 0.2, 0.2)
    assert load_config(DIGITS, ["algorithm.name=ppo", "critic.path=models/reward"]).critic_path == "models/reward"
    with pytest.raises(ConfigError, match=r"^algorithm\.gae_lambda is 0.9: grpo does not read it; it reads normalize_"):
        algorithm("algorithm.gae_lambda=0.9")
    for override in ("algorithm.gamma=1.1", "algorithm.gae_lambda=-0.1", "algorithm.value_clip=0", "critic.lr=0"):
        with pytest.raises(ConfigError, match=override.split("=")[0]):
            load_config(DIGITS, ["algorithm.name=ppo", override])


def test_an_algorithm_that_weighs_whole_responses_leaves_no_token_out() -> None:
    icepop = ("algorithm.correction.kind=icepop", "algorithm.correction.level=geometric")
    assert algorithm("algorithm.name=gspo", *icepop).settings().correction.level == "geometric"
    with pytest.raises(
        ConfigError, match=r"correction.level is token, so icepop leaves single tokens out of a response"
    ):
        algorithm("algorithm.name=gspo", icepop[0])
    assert algorithm("algorithm.name=grpo", icepop[0]).settings().correction.level == "token"
    assert algorithm("algorithm.name=gspo", "algorithm.correction.kind=tis").settings().correction.level == "token"
