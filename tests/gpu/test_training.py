"""Training ranks on a GPU: every family against transformers on the CPU, released memory, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import build_model
from models.layout.parallel import Parallel
from models.lora.settings import LoraSettings
from models.weights.checkpoint_files import CheckpointFiles
from tests.models import parity
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.tiny import MODELS, build_folder
from yatt_mm.training.offload import Holding
from yatt_mm.training.optimizer import make_state

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
FLOAT32, BFLOAT16 = 2e-4, 0.1
"""The largest difference of a log-probability from transformers' float32 on the CPU."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("untied"))


@pytest.mark.parametrize("family", MODELS)
def test_a_model_equals_transformers(family: str, world: None, tmp_path: Path) -> None:
    reference = parity.write_reference(build_folder(tmp_path, family))
    seen = parity.compare(0, reference, Parallel())
    print(f"{family}: {seen}")
    assert seen.logprob < FLOAT32
    assert seen.entropy < FLOAT32
    assert seen.gradient < 5e-3
    assert seen.num_changed_weights == 0


@pytest.mark.parametrize("family", MODELS)
def test_a_model_in_half_precision_is_near_its_float32(family: str, world: None, tmp_path: Path) -> None:
    build_folder(tmp_path, family)
    worst = jobs.worst_of_bfloat16(0, tmp_path)
    print(f"{family}: bfloat16 is at most {worst:.1e} from float32")
    assert worst < BFLOAT16


@pytest.mark.parametrize("frozen", [(), ("tower",)], ids=["all", "frozen tower"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_with_everything_released_in_between_have_the_same_bits(
    frozen: tuple[str, ...], dtype: str, world: None, folder: Path
) -> None:
    settings = SETTINGS | {"dtype": dtype, "freeze": frozen}
    plain = jobs.train(0, folder, Parallel(), 3, settings)
    moved = jobs.train_with_releases(0, folder, Parallel(), 3, settings)
    assert moved["losses"] == plain["losses"]
    assert moved["norms"] == plain["norms"]
    assert all(np.array_equal(moved["weights"][name], plain["weights"][name]) for name in plain["weights"])
    assert moved["left"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("dtype", "offloaded"), [("float32", 0.0), ("bfloat16", 0.0), ("bfloat16", 0.5), ("bfloat16", 1.0)]
)
def test_a_checkpoint_continues_with_the_same_bits(
    dtype: str, offloaded: float, world: None, folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"offload_frac": offloaded} if offloaded else {}
    saved = jobs.train_and_save(0, folder, Parallel(), tmp_path, dtype, settings)
    loaded = jobs.load_and_train(0, folder, Parallel(), tmp_path, dtype, settings)
    assert loaded["losses"] == saved["losses"]
    assert loaded["norms"] == saved["norms"]
    assert all(np.array_equal(loaded["weights"][name], saved["weights"][name]) for name in saved["weights"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_trained_released_merged_and_saved(dtype: str, world: None, folder: Path, tmp_path: Path) -> None:
    lora = LoraSettings(rank=4, alpha=8.0, targets=("language.q_proj", "language.down_proj", "tower"))
    settings = SETTINGS | {"dtype": dtype, "lora": lora}
    plain = jobs.train(0, folder, Parallel(), 3, settings)
    moved = jobs.train_with_releases(0, folder, Parallel(), 3, settings)
    saved = jobs.train_and_save(0, folder, Parallel(), tmp_path, dtype, {"lora": lora})
    loaded = jobs.load_and_train(0, folder, Parallel(), tmp_path, dtype, {"lora": lora})
    for found, wanted in ((moved, plain), (loaded, saved)):
        assert found["losses"] == wanted["losses"]
        assert all(np.array_equal(found["weights"][name], wanted["weights"][name]) for name in wanted["weights"])
    assert len({*plain["losses"]}) == 3


def test_optimizer_state_on_the_host_trains_like_that_on_the_device(world: None, folder: Path) -> None:
    settings = SETTINGS | {"dtype": "bfloat16"}
    plain = jobs.train(0, folder, Parallel(), 3, settings)
    offloaded = jobs.train(0, folder, Parallel(), 3, settings | {"offload_frac": 1.0})
    assert np.allclose(offloaded["losses"], plain["losses"], rtol=1e-4)


def test_released_memory_is_free_for_others(world: None, tmp_path: Path) -> None:
    """Torch gives what a rank released back to the device."""
    build_model(tmp_path, num_layers=2, hidden=512, dtype="bfloat16")
    engine = jobs.build_engine(tmp_path, Parallel(), dtype="bfloat16")
    make_state(engine._optimizer)
    torch.cuda.empty_cache()
    held = sum(engine.memory.resident_bytes(part) for part in Holding)
    before = torch.cuda.memory_reserved()
    engine.memory.hold([])
    assert held > 1 << 30
    assert before - torch.cuda.memory_reserved() > 0.9 * held


def test_a_reference_is_measured_with_its_own_weights_and_the_others_come_back(
    world: None, folder: Path, tmp_path: Path
) -> None:
    """Test with the model before its training as the reference of the trained one."""
    engine = jobs.build_engine(folder, Parallel(), dtype="bfloat16")
    wanted = engine.logprobs(jobs.microbatches(engine))
    jobs._steps(engine, 2)
    trained = engine.logprobs(jobs.microbatches(engine))
    with engine.weights_of(CheckpointFiles(folder)):
        found = engine.logprobs(jobs.microbatches(engine))
    again = engine.logprobs(jobs.microbatches(engine))
    for one, other in ((found, wanted), (again, trained)):
        assert all(np.array_equal(a, b) for x, y in zip(one, other) for a, b in zip(x, y, strict=True))
    assert not np.array_equal(trained[0][0], wanted[0][0])
