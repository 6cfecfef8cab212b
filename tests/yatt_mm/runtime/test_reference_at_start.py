"""Tests that a run which goes on finds the reference of its next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from yatt_mm.common.errors import ConfigError
from yatt_mm.common.manifest import write_manifest
from yatt_mm.config.run_config import load_config
from yatt_mm.runtime.start_point import check_reference_folder

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
