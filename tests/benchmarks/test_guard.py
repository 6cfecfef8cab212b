"""Tests of `benchmarks/guard.py`, which proves that a refactoring changed nothing: what it compares, and where each
side finds its packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import guard

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "yatt-mm"
version = "0.1.0"
[project.entry-points."vllm.general_plugins"]
yatt_mm = "models:other_plugin"
[tool.setuptools.packages.find]
include = ["models*"]
"""
PLUGINS = """
import importlib.metadata, json
found = importlib.metadata.entry_points(group="vllm.general_plugins")
print(json.dumps([point.value for point in found if point.name == "yatt_mm"]))
"""


def side_with(folder: Path, files: dict[str, str]) -> guard.Side:
    side = guard.Side(name="old", folder=folder, checkout=folder / "checkout", python=folder / "env" / "bin" / "python")
    for name, text in files.items():
        path = side.checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return side


def test_seconds_bytes_and_background_counts_are_not_compared() -> None:
    old = guard.values_of([{"step": 0, "train/loss": 1.0, "time/step_s": 1.0, "placement/rollout_devices": 2.0}])
    new = guard.values_of([{"step": 0, "train/loss": 1.0, "time/step_s": 2.0, "placement/rollout_devices": 1.9}])
    assert guard.compare(old, new) == {"num_values": 2, "num_different": 0}
    left_out = ("controller/rss_bytes_max", "genrm/bytes_moved", "placement/train_wake_s_max", "dataplane/num_media")
    compared = ("train/loss", "eval/num_samples", "rollout/staleness_max", "sampling/num_prompts_used")
    assert all(guard.LEFT_OUT.search(key) for key in left_out)
    assert not any(guard.LEFT_OUT.search(key) for key in compared)


def test_the_first_difference_is_told_with_both_values() -> None:
    old = guard.values_of([{"step": step, "train/loss": 0.1, "train/entropy": 1.0} for step in range(3)])
    new = {**old, (2, "train/entropy"): "2.0", (1, "train/loss"): repr(0.1 + 2**-55)}
    assert guard.compare(old, new) == {
        "num_values": 9,
        "num_different": 2,
        "step": 1,
        "key": "train/loss",
        "old": "0.1",
        "new": repr(0.1 + 2**-55),
    }


def test_the_sign_of_zero_is_a_difference_and_nan_is_none() -> None:
    old, new = ([{"step": 0, "train/loss": zero, "train/entropy": float("nan")}] for zero in (0.0, -0.0))
    found = guard.compare(guard.values_of(old), guard.values_of(new))
    assert (found["num_different"], found["key"]) == (1, "train/loss")


@pytest.mark.parametrize("key", ["train/loss", "time/train_s"])
def test_a_key_on_one_side_only_is_a_difference_even_if_its_value_is_left_out(key: str) -> None:
    old, new = guard.values_of([{"step": 0}, {"step": 1, key: 0.5}]), guard.values_of([{"step": 0}, {"step": 1}])
    assert guard.compare(old, new)["new"] == "missing"
    assert guard.compare(new, old)["old"] == "missing"


def test_a_side_has_its_own_packages_and_plugins_and_what_else_is_installed(tmp_path: Path) -> None:
    side = side_with(tmp_path, {"pyproject.toml": PROJECT, "models/__init__.py": ""})
    guard.make_environment(side)
    inside = {"cwd": tmp_path, "env": guard.environment(), "capture_output": True, "text": True, "check": True}
    plugins = subprocess.run([side.python, "-c", PLUGINS], **inside)
    assert json.loads(plugins.stdout) == ["models:other_plugin"]
    subprocess.run([side.python, "-c", "import rich"], **inside)


def test_a_side_whose_package_comes_from_elsewhere_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.touch()
    side = side_with(
        tmp_path / "old", {"pyproject.toml": PROJECT, "models/__init__.py": f"__file__ = {str(elsewhere)!r}"}
    )
    with pytest.raises(guard.GuardError, match="models of the old commit comes from"):
        guard.make_environment(side)


def test_an_unknown_revision_is_an_error_and_not_a_difference() -> None:
    command = [sys.executable, guard.__file__, "no-such-revision", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-revision" in done.stderr
