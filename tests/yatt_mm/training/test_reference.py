"""Tests of the weights of a reference in the place of the trained ones: what is computed with them, and that the
trained ones come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.layout.parallel import Parallel
from models.weights.checkpoint_files import CheckpointFiles
from tests.models.layouts import quick_first
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool

CASES = {
    "tp2": (Parallel(tp=2), "float32", ()),
    "dp2, bfloat16": (Parallel(dp=2), "bfloat16", ()),
    "pp2, frozen tower": (Parallel(pp=2), "float32", ("tower",)),
    "ep2": (Parallel(ep=2, dp=2), "float32", ()),
}


@pytest.fixture(scope="module")
def other_folders(
    untied_folder: Path, experts_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, Path]:
    """By folder another one, with the same architecture and other weights."""
    found = {}
    for folder in (untied_folder, experts_folder):
        found[folder] = other = tmp_path_factory.mktemp("reference")
        for file in folder.iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        random = torch.Generator().manual_seed(7)
        tensors = {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=random)
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return found


def train_beside(
    rank: int, folder: Path, reference: Path | None, parallel: Parallel, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return three updates; before each one but the first, the log-probabilities of the reference if there is one, and
    those of the model before and after."""
    engine = jobs.build_engine(folder, parallel, **settings)
    files, measured = CheckpointFiles(reference) if reference else None, []
    done: dict[str, Any] = {"losses": [], "norms": []}
    for number in range(3):
        if files is not None and number:
            own = engine.logprobs(jobs.microbatches(engine))
            with engine.weights_of(files):
                measured.append(engine.logprobs(jobs.microbatches(engine)))
            again = engine.logprobs(jobs.microbatches(engine))
            assert all(np.array_equal(a, b) for x, y in zip(own, again) for a, b in zip(x, y, strict=True))
        step = jobs._steps(engine, 1)
        done = {name: done[name] + step[name] for name in done}
    return done | {"weights": jobs.exported(engine), "measured": measured}


def logprobs_of(rank: int, folder: Path, parallel: Parallel, dtype: str) -> list[list[np.ndarray]]:
    engine = jobs.build_engine(folder, parallel, dtype=dtype)
    return engine.logprobs(jobs.microbatches(engine))


@pytest.mark.parametrize("case", quick_first(CASES, ("dp2, bfloat16", "pp2, frozen tower", "ep2")))
def test_a_reference_is_measured_with_its_own_weights_and_training_goes_on_with_the_same_bits(
    case: str, ranks: RankPool, untied_folder: Path, experts_folder: Path, other_folders: dict[Path, Path]
) -> None:
    parallel, dtype, frozen = CASES[case]
    folder = experts_folder if parallel.ep > 1 else untied_folder
    settings = {"dtype": dtype, "freeze": frozen, "weight_decay": 0.1}
    plain = ranks.run(2, train_beside, folder, None, parallel, settings)
    beside = ranks.run(2, train_beside, folder, other_folders[folder], parallel, settings)
    alone = ranks.run(2, logprobs_of, other_folders[folder], parallel, dtype)
    num_compared = 0
    for with_it, without, wanted in zip(beside, plain, alone, strict=True):
        assert with_it["losses"] == without["losses"]
        assert with_it["norms"] == without["norms"]
        assert all(np.array_equal(with_it["weights"][name], without["weights"][name]) for name in without["weights"])
        for measured in with_it["measured"]:
            for micro, of_micro in zip(measured, wanted, strict=True):
                for found, logprobs in zip(micro, of_micro, strict=True):
                    assert np.array_equal(found, logprobs)
                    num_compared += 1
    assert num_compared > 0
