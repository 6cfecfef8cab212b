"""Tests of training with LoRA: adapters alone are trained, from any layout to any other, beside a reference."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.layout.parallel import Parallel
from models.lora.peft_folder import FOLDER, PREFIX
from models.lora.settings import LoraSettings
from tests.models.layouts import quick_first
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.lora import lora_jobs
from tests.yatt_mm.training.lora.lora_jobs import EVERYWHERE
from tests.yatt_mm.training.ranks import RankPool

SETTINGS: dict[str, Any] = {"lora": EVERYWHERE, "lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
TP2_SP, TP2_PP2_SP, DP2, EP2 = (
    Parallel(tp=2, sp=True),
    Parallel(tp=2, pp=2, sp=True),
    Parallel(dp=2),
    Parallel(ep=2, dp=2),
)
LANGUAGE, TOWER = (LoraSettings(rank=4, alpha=6.0, targets=(part,)) for part in ("language", "tower"))
TARGETS = {"everywhere": EVERYWHERE, "language": LANGUAGE, "tower": TOWER}
CURVES: dict[str, tuple[Parallel, dict[str, Any]]] = {
    "tp2 pp2 sp": (TP2_PP2_SP, {}),
    "dp2, overlap": (DP2, {"overlap_grad_reduce": True}),
    "pp2 vpp2, recomputed": (Parallel(pp=2, vpp=2), {"recompute": "full"}),
    "cp2": (Parallel(cp=2, cp_order="zigzag"), {}),
    "one rank, recomputed": (Parallel(), {"recompute": "full"}),
    "tp2": (Parallel(tp=2), {}),
}


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Any:
    """Return a function that gives what one rank alone computes of a model with some targets."""
    done: dict[tuple[Path, LoraSettings], dict[str, Any]] = {}

    def of(folder: Path, lora: LoraSettings) -> dict[str, Any]:
        key = folder, lora
        if key not in done:
            done[key] = ranks.run(1, lora_jobs.trained, folder, Parallel(), SETTINGS | {"lora": lora})[0]
        return done[key]

    return of


def test_adapters_alone_are_trained_and_have_optimizer_state(alone: Any, deep_folder: Path) -> None:
    for lora in (EVERYWHERE, TOWER):
        found = alone(deep_folder, lora)
        before, after = found["base"]
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert found["num_trained"] <= found["num_states"] < found["num_trained"] + 1024  # padding
        adapted = {name.partition(".lora_")[0] for name in found["matrices"]}
        changed = {name for name in before if not np.array_equal(found["weights"][name], before[name])}
        assert changed == {f"{layer}.weight" for layer in adapted}
        assert (lora is TOWER) == (not any("self_attn" in name for name in changed))


QUICK = ("tp2 pp2 sp: everywhere", "dp2, overlap: tower")
"""The curves of `make test`; the others are for `make parity`."""


@pytest.mark.parametrize("case", quick_first([f"{case}: {name}" for case in CURVES for name in TARGETS], QUICK))
def test_curves_do_not_depend_on_the_layout(case: str, ranks: RankPool, deep_folder: Path, alone: Any) -> None:
    layout, _, name = case.partition(": ")
    (parallel, given), lora = CURVES[layout], TARGETS[name]
    wanted = alone(deep_folder, lora)
    for found in ranks.run(
        parallel.world_size, lora_jobs.trained, deep_folder, parallel, SETTINGS | given | {"lora": lora}
    ):
        check_same(found, wanted)


@pytest.mark.parametrize("lora", [pytest.param(LANGUAGE, marks=pytest.mark.parity), TOWER], ids=["language", "tower"])
def test_replicas_that_share_experts_have_the_same_curve_though_one_sees_text_alone(
    lora: LoraSettings, ranks: RankPool, experts_folder: Path, alone: Any
) -> None:
    wanted = alone(experts_folder, lora)
    for found in ranks.run(2, lora_jobs.trained, experts_folder, EP2, SETTINGS | {"lora": lora}):
        check_same(found, wanted)


def check_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    for name, matrix in wanted["matrices"].items():
        assert np.array_equal(found["matrices"][name], matrix), name
        assert matrix.any() == (".lora_A." in name)


def test_memory_that_is_released_between_updates_changes_no_bit(ranks: RankPool, untied_folder: Path) -> None:
    arguments = (untied_folder, TP2_SP, 3, SETTINGS)
    plain = ranks.run(2, jobs.train, *arguments)[0]
    released = ranks.run(2, jobs.train_with_releases, *arguments)[0]
    assert released["losses"] == plain["losses"] and released["norms"] == plain["norms"]
    assert all(np.array_equal(released["weights"][name], plain["weights"][name]) for name in plain["weights"])
    assert released["left"] == [0, 0, 0]


MOVES = {
    "tp2 pp2 sp to dp2": (TP2_PP2_SP, DP2, "untied_folder"),
    "dp2 to tp2 sp": (DP2, TP2_SP, "untied_folder"),
    "tp2 sp to tp2 sp": (TP2_SP, TP2_SP, "untied_folder"),
    "one rank to pp2": (Parallel(), Parallel(pp=2), "untied_folder"),
    "tp2 sp ep2 to dp2": (Parallel(tp=2, sp=True, ep=2), DP2, "experts_folder"),
    "one rank to ep2": (Parallel(), EP2, "experts_folder"),
}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.parity)])
@pytest.mark.parametrize("move", quick_first(MOVES, ("tp2 pp2 sp to dp2",)))
def test_a_checkpoint_of_adapters_continues_in_any_layout(
    move: str, dtype: str, ranks: RankPool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    first, second, model = MOVES[move]
    folder = request.getfixturevalue(model)
    settings = {"lora": EVERYWHERE}
    wanted = ranks.run(first.world_size, jobs.train_and_save, folder, first, tmp_path, dtype, settings)[0]
    found = ranks.run(second.world_size, jobs.load_and_train, folder, second, tmp_path, dtype, settings)[0]
    if first == second:
        assert found["losses"] == wanted["losses"] and found["norms"] == wanted["norms"]
        assert all(np.array_equal(found["weights"][name], wanted["weights"][name]) for name in wanted["weights"])
    else:
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6 if dtype == "float32" else 1e-2)
        for name, weight in wanted["saved"].items():
            assert np.allclose(found["loaded"][name], weight, rtol=0, atol=1e-6 if dtype == "float32" else 1e-2), name


def test_a_checkpoint_of_other_adapters_is_refused_by_name(
    ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    ranks.run(2, jobs.train_and_save, untied_folder, DP2, tmp_path, "float32", {"lora": EVERYWHERE})
    for lora, message in {
        replace(EVERYWHERE, rank=2): r"train.lora.rank was 4 when the checkpoint was saved, and is 2: set it back",
        replace(EVERYWHERE, alpha=8.0): "train.lora.alpha was 6 when the checkpoint was saved, and is 8",
        LANGUAGE: "train.lora.targets was language, merger, tower when the checkpoint was saved, and is language:",
        None: "train.lora.alpha was 6 when the checkpoint was saved, and is not set",
    }.items():
        with pytest.raises(AssertionError, match=message):
            ranks.run(2, jobs.load_and_train, untied_folder, DP2, tmp_path, "float32", {"lora": lora})


def test_a_checkpoint_of_another_base_is_refused(ranks: RankPool, untied_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(untied_folder, other)
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    save_file(tensors | {name: tensors[name] + 0.01}, other / "model.safetensors", metadata={"format": "pt"})
    settings = {"lora": EVERYWHERE}
    ranks.run(2, jobs.train_and_save, untied_folder, DP2, tmp_path / "saved", "float32", settings)
    with pytest.raises(AssertionError, match=r"model.path is not the model whose adapters are in the checkpoint"):
        ranks.run(2, jobs.load_and_train, other, DP2, tmp_path / "saved", "float32", settings)


@pytest.mark.parametrize("parallel", [TP2_SP, pytest.param(Parallel(pp=2), marks=pytest.mark.parity)])
def test_the_base_is_a_reference_without_a_swap_and_others_are_measured_without_adapters(
    parallel: Parallel, ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    ranks.run(1, lora_jobs.export_after_training, untied_folder, Parallel(), EVERYWHERE, tmp_path / "hf")
    references = {"base": untied_folder, "other": tmp_path / "hf"}
    plain = ranks.run(2, lora_jobs.trained_beside, untied_folder, {}, parallel, EVERYWHERE)
    found = ranks.run(2, lora_jobs.trained_beside, untied_folder, references, parallel, EVERYWHERE)
    for name, folder in references.items():
        of_reference = ranks.run(2, lora_jobs.logprobs, folder, parallel)
        for of_rank, wanted in zip(found, of_reference, strict=True):
            assert of_rank["num_swaps"][name] == (name == "other")
            pairs = [
                (a, b)
                for micro, others in zip(of_rank["measured"][name], wanted, strict=True)
                for a, b in zip(micro, others, strict=True)
            ]
            assert all(np.array_equal(a, b) for a, b in pairs)
    assert found[1]["measured"]["base"]
    for of_rank, without in zip(found, plain, strict=True):
        assert (of_rank["losses"], of_rank["norms"]) == (without["losses"], without["norms"])
        assert all(np.array_equal(of_rank["weights"][name], without["weights"][name]) for name in without["weights"])


def test_some_layers_of_one_weight_are_adapted_alone(ranks: RankPool, untied_folder: Path, tmp_path: Path) -> None:
    lora = LoraSettings(rank=4, alpha=8.0, targets=("language.q_proj", "language.up_proj", "tower.proj"))
    ranks.run(2, lora_jobs.export_after_training, untied_folder, TP2_SP, lora, tmp_path / "hf")
    base, merged = (load_file(path / "model.safetensors") for path in (untied_folder, tmp_path / "hf"))
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    layers = [f"{name}.{layer}" for name in ("0", "1") for layer in ("self_attn.q_proj", "mlp.up_proj")]
    wanted = {f"model.language_model.layers.{layer}" for layer in layers}
    wanted |= {f"model.visual.blocks.{block}.attn.proj" for block in (0, 1)}
    config = json.loads((tmp_path / "hf" / FOLDER / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == wanted
    matrices = load_file(tmp_path / "hf" / FOLDER / "adapter_model.safetensors")
    assert {name.removeprefix(PREFIX).partition(".lora_")[0] for name in matrices} == wanted
    assert len(changed) == len(wanted)
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "up_proj", "proj"}


@pytest.mark.parametrize(
    ("model", "parallel", "targets", "message"),
    [
        ("untied_folder", Parallel(pp=2), ("language.qproj",), "names language.qproj, .* language.q_proj"),
        ("untied_folder", Parallel(pp=2), ("tower.fc1",), "wanted language, merger, tower, tower.down_proj, .*qkv"),
        ("experts_folder", EP2, ("language.up_proj",), "experts, and the MLPs in their places, get no adapters"),
    ],
)
def test_a_layer_that_the_model_does_not_have_is_refused_with_those_that_it_has(
    model: str,
    parallel: Parallel,
    targets: tuple[str, ...],
    message: str,
    ranks: RankPool,
    request: pytest.FixtureRequest,
) -> None:
    lora = LoraSettings(rank=4, alpha=8.0, targets=targets)
    with pytest.raises(AssertionError, match=message):
        ranks.run(2, lora_jobs.logprobs, request.getfixturevalue(model), parallel, lora)
