"""Tests that the configs of the examples that no other test runs work: three steps of each, with its own settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.digits.model import TOKENIZER_TEXT, build_model_folder
from examples.judge import lessons
from examples.motion import data as motion
from examples.motion import prepare as motion_example
from examples.preparing import WarmedUp
from tests.yatt_mm import runs

pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

NUM_STEPS = 3


def run(config: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Run three steps of a config in a folder, check what holds for all of them, and return its steps."""
    name = config.removesuffix("_cpu")
    shared = (f"run.dir={folder / 'runs'}", f"run.name={name}", f"train.steps={NUM_STEPS}", "train.prompts_per_step=16")
    done = runs.run([f"configs/{config}.yaml", *shared, *overrides])
    assert done.status == 0 and done.left_behind == [], done.output
    before, *steps = runs.metrics(folder, name)
    assert "eval/accuracy" in before and len(steps) == NUM_STEPS
    for record in steps:
        assert record["rollout/logprob_diff_mean"] < 1e-5 and record["train/grad_norm"] > 0
    return steps


def digits(made: Path) -> tuple[str, ...]:
    """Return overrides that name the digits as `make train` prepares them."""
    return (f"model.path={made}/model", f"data.train={made}/train-*.tar", f"data.eval={made}/eval-*.tar")


def test_digits_with_lora(prepared_digits: tuple[Path, WarmedUp], tmp_path: Path) -> None:
    run("digits_lora_cpu", tmp_path, *digits(prepared_digits[0]))
    assert list((tmp_path / "runs").rglob("adapter_model.safetensors"))


@pytest.mark.parametrize("config", ["judge_full_cpu", "judge_partial_cpu"])
def test_digits_with_a_judge(config: str, prepared_digits: tuple[Path, WarmedUp], tmp_path: Path) -> None:
    """Test with a judge that has learned nothing, whose verdict is the probability itself, so that there is signal."""
    build_model_folder(tmp_path / "judge", seed=0, text=TOKENIZER_TEXT + lessons.TOKENIZER_TEXT)
    judge = (f"reward.judges.digits.model={tmp_path / 'judge'}", "reward.judges.digits.threshold=null")
    for record in run(config, tmp_path, *digits(prepared_digits[0]), *judge, "algorithm.min_reward_range=0"):
        assert record["genrm/num_judged"] >= 16 * 8 and not record["genrm/num_failed"]
        assert record["reward/mean"] == pytest.approx(record["genrm/digits_mean"])


def test_motion(tmp_path: Path) -> None:
    build_model_folder(tmp_path / "model", seed=0, text=motion_example.TOKENIZER_TEXT)
    motion.write_shards(tmp_path, motion.make_split(seed=0, num_train=48, num_held_out=12))
    reward = "reward.function=tests.yatt_mm.any_reward:even_length"  # the model has learned nothing
    (*_, last) = run("motion_cpu", tmp_path, *digits(tmp_path), reward)
    assert last["dataplane/num_media"] == last["dataplane/num_processed"] == 48 + 12
