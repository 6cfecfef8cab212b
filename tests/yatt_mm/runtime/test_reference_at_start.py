"""Tests that a run which goes on finds the reference of its next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from yatt_mm.common.errors import ConfigError
from yatt_mm.common.manifest import write_manifest
from yatt_mm.config.run_config import load_config
from yatt_mm.runtime.start_point import check_reference_folder, kl_coef_of

DIGITS = Path(__file__).parents[3] / "configs" / "digits_cpu.yaml"


def test_a_run_goes_on_only_with_the_reference_of_its_next_step(tmp_path: Path) -> None:
    config = load_config(DIGITS, ["algorithm.kl.where=loss", "reference.renew_every=2", f"run.dir={tmp_path}"])
    check_reference_folder(config, 1)
    with pytest.raises(ConfigError, match=r"the reference of step 4 is .* cannot be used: .*reference/step_000002"):
        check_reference_folder(config, 3)
    folder = config.run_dir / "reference" / "step_000002"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    write_manifest(folder)
    check_reference_folder(config, 3)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"reference/step_000002/config.json .*If reference.renew_every is new"):
        check_reference_folder(config, 3)
    check_reference_folder(config, config.train.steps)  # there is no next step
    check_reference_folder(load_config(DIGITS), 3)


def test_a_run_goes_on_with_the_weight_that_the_checkpoint_has_unless_it_is_given_another_one() -> None:
    given = ["algorithm.kl.where=reward", "algorithm.kl.coef=0.05", "algorithm.kl.target=0.02"]
    config = load_config(DIGITS, given)
    state = {"kl_coef": 0.0625, "config": config.model_dump(mode="json")}
    assert kl_coef_of(config, state) == 0.0625
    assert kl_coef_of(load_config(DIGITS, [*given, "algorithm.kl.coef=0.5"]), state) is None
    assert kl_coef_of(config, None) is None
    del state["config"]["algorithm"]["kl"]  # a checkpoint of an older version
    assert kl_coef_of(config, state) is None
