"""Tests of the console commands `yatt-mm` and `dataplane`, and of the modules that `python -m` runs."""

import subprocess
import sys
from pathlib import Path

import pytest


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def installed(name: str) -> str:
    """Return the path of a command in the environment of this Python."""
    path = Path(sys.executable).parent / name
    assert path.exists(), f"{name} is not installed; run: pip install -e ."
    return str(path)


@pytest.mark.parametrize("command", ["train", "data", "evaluate", "samples", "simulate"])
def test_yatt_mm_and_python_m_explain_the_same_command(command: str) -> None:
    short, long = (
        run(installed("yatt-mm"), command, "--help"),
        run(sys.executable, "-m", f"yatt_mm.{command}", "--help"),
    )
    assert short.returncode == 0 == long.returncode
    assert short.stdout.startswith(f"usage: yatt-mm {command} ")
    assert long.stdout.startswith(f"usage: python -m yatt_mm.{command} ")
    assert "examples:" in short.stdout


def test_yatt_mm_passes_errors_and_the_exit_status_on() -> None:
    done = run(installed("yatt-mm"), "train", "no/such.yaml")
    assert done.returncode == 2 and "no/such.yaml" in done.stderr


@pytest.mark.parametrize("command", [("--help",), ("-h",)])
def test_yatt_mm_says_which_commands_there_are(command: tuple[str, ...]) -> None:
    done = run(installed("yatt-mm"), *command)
    assert done.returncode == 0 and "yatt-mm train configs/digits_cpu.yaml" in done.stdout
    assert run(sys.executable, "-m", "yatt_mm", *command).stdout == done.stdout


@pytest.mark.parametrize(("command", "found"), [((), "no command"), (("trian",), "unknown command 'trian'")])
def test_a_command_that_is_not_there_is_refused(command: tuple[str, ...], found: str) -> None:
    done = run(installed("yatt-mm"), *command)
    assert (
        done.returncode == 2
        and f"error: {found}; wanted train, data, evaluate, samples or simulate" in done.stderr
        and not done.stdout
    )


def test_dataplane_is_the_same_as_python_m_dataplane() -> None:
    short, long = run(installed("dataplane"), "--help"), run(sys.executable, "-m", "dataplane", "--help")
    assert short.returncode == 0 == long.returncode
    assert short.stdout.startswith("usage: dataplane ") and long.stdout.startswith("usage: python -m dataplane ")
    assert short.stdout.split("\n\n", 1)[1] == long.stdout.split("\n\n", 1)[1]


def test_an_override_after_resume_is_no_folder(tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "configs" / "digits_cpu.yaml"
    done = run(
        sys.executable,
        "-m",
        "yatt_mm.train",
        str(config),
        "--resume",
        "train.steps=y",
        f"run.dir={tmp_path}",
        "train.steps=x",
    )
    assert done.returncode == 2 and "train.steps is 'x': wanted a whole number" in done.stderr
    assert "--resume" not in done.stderr
