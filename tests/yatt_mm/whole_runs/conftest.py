"""Fixtures of the whole runs: the digits example, and a run on it with which others are compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.made_once import made_once
from tests.tables import show_seconds
from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs.deaths import FEW, PHASES

if TYPE_CHECKING:
    from examples.preparing import WarmedUp

NUM_TRAIN = 400
CORRUPT = 20
"""The place in the training shard of a scan whose PNG ends in the middle."""
NUM_PROMPTS, GROUP_SIZE, NUM_STEPS = 48, 8, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """The digits example in a small version: shards, and the model after its warm-up."""

    folder: Path
    """The folder with the shards `train-*.tar` and `eval-*.tar`; runs write into its folder `runs`."""
    model: Path
    accuracy: float
    """The share of the held-out scans that the model reads, as the warm-up measured it with transformers."""
    num_eval: int

    def arguments(self, name: str, *overrides: str) -> list[str]:
        """Return the arguments of a deterministic run in which the model learns to read."""
        return runs.arguments(
            self.folder,
            self.model,
            name,
            f"train.steps={NUM_STEPS}",
            f"train.prompts_per_step={NUM_PROMPTS}",
            f"rollout.group_size={GROUP_SIZE}",
            "train.num_minibatches=6",
            "reward.function=yatt_mm.rewards.functions:exact_match",
            "eval.every=6",
            "checkpoint.keep=6",
            *overrides,
        )

    def run(self, name: str) -> Path:
        """Return the folder of the results of a run."""
        return self.folder / "runs" / name

    def accuracies(self, name: str) -> list[float]:
        """Return the held-out accuracies of a run, in the order of its steps."""
        records = runs.metrics(self.folder, name)
        return [record["eval/accuracy"] for record in records if "eval/accuracy" in record]


@pytest.fixture(scope="session")
def digits(prepared_digits: tuple[Path, WarmedUp], tmp_path_factory: pytest.TempPathFactory) -> Digits:
    from examples.digits.data import Split, make_split, write_shards  # loads scikit-learn and torch

    made, prepared = prepared_digits

    def make(folder: Path) -> Digits:
        split = make_split(seed=0)
        train = list(split.train[:NUM_TRAIN])
        train[CORRUPT] = replace(train[CORRUPT], png=train[CORRUPT].png[: len(train[CORRUPT].png) // 2])
        write_shards(folder, Split(train=tuple(train), held_out=split.held_out))
        runs.write_shard(folder / FEW, range(1000, 1024))
        return Digits(folder=folder, model=made / "model", accuracy=prepared.accuracy, num_eval=len(split.held_out))

    return made_once(tmp_path_factory, "digits", make)


@pytest.fixture(scope="session")
def whole(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> runs.Finished:
    """A run without a break, in which every training sample is drawn at least once, and all responses are kept."""
    arguments = digits.arguments("whole", "rollouts.keep=all", "eval.keep_best=eval/accuracy")
    return made_once(tmp_path_factory, "whole", lambda _: runs.run(arguments))


@pytest.fixture(scope="module")
def repair_seconds(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, float]]]:
    """[what dies][phase] the seconds of a repair, shown as a table at the end."""
    seconds: dict[str, dict[str, float]] = {}
    yield seconds
    columns = ["what dies", *(phase for _, phase in PHASES)]
    show_seconds(request.config, "seconds of a repair", columns, seconds, num_digits=1)
