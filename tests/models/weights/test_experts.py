"""Tests of experts: the forms in which checkpoints keep them, and updates that do not depend on which rank holds
them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.layout.parallel import Parallel
from models.qwen3_vl_moe.mapping import expert_layout
from models.weights.expert_stack import ExpertLayout, expert_parts, expert_shapes
from models.weights.slicing import Shapes
from tests.models.layouts import LAYOUTS, quick_first
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import build_folder

EXPERTS = "model.language_model.layers.{layer}.mlp.experts."
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
TRAINED = ("ep2", "tp2-sp-ep2", "tp2-sp-etp2", "tp2-pp2-sp-ep2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("experts"), "qwen3_vl_moe")


@pytest.fixture(scope="module")
def alone(ranks: RankPool, folder: Path) -> dict[str, Any]:
    """What one rank finds that holds all experts."""
    return ranks.run(1, jobs.train, folder, Parallel(), 3, SETTINGS)[0]


@pytest.mark.parametrize("layout", quick_first(TRAINED, ("tp2-sp-ep2",)))
def test_updates_do_not_depend_on_who_holds_the_experts(
    layout: str, ranks: RankPool, folder: Path, alone: dict[str, Any]
) -> None:
    # the norm covers experts once, whatever groups they are summed over
    parallel = LAYOUTS[layout]
    for result in ranks.run(parallel.world_size, jobs.train, folder, parallel, 3, SETTINGS):
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-5)


@pytest.mark.parametrize("form", ["out_in", "named"])
def test_every_form_loads_and_exports_its_own_bits(
    form: ExpertLayout, ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    released = load_file(folder / "model.safetensors")
    tensors = {name: value for name, value in released.items() if ".experts." not in name}
    tensors |= in_form(form, {name: value for name, value in released.items() if ".experts." in name})
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    found, logprobs = ranks.run(2, jobs.export_and_score, tmp_path, Parallel(ep=2, dp=2))[0]
    assert found.keys() == tensors.keys()
    assert all(torch.equal(torch.from_numpy(found[name]), tensors[name]) for name in tensors)
    _, wanted = ranks.run(2, jobs.export_and_score, folder, Parallel(ep=2, dp=2))[0]
    assert all((ours == theirs).all() for ours, theirs in zip(logprobs, wanted, strict=True))


def in_form(form: ExpertLayout, released: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return experts [num_experts, in, out] in another form."""
    if form == "out_in":
        return {name: value.transpose(1, 2).contiguous() for name, value in released.items()}
    tensors = {}
    for name, value in released.items():
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for expert, joined in enumerate(value):
            for part, tensor in zip(parts, joined.t().chunk(len(parts)), strict=True):
                tensors[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] = tensor.contiguous()
    return tensors


@pytest.mark.parametrize("inner", [32, 64, 48])
@pytest.mark.parametrize("form", ["in_out", "out_in"])
def test_square_tensors_are_told_by_the_other_one(form: ExpertLayout, inner: int) -> None:
    # hidden size 64: gate and up together are square for 32, the way down for 64
    text = SimpleNamespace(num_experts=8, moe_intermediate_size=inner, hidden_size=64)
    shapes: dict[str, tuple[int, ...]] = {"gate_up_proj": (8, 2 * inner, 64), "down_proj": (8, 64, inner)}
    if form == "in_out":
        shapes = {name: (experts, columns, rows) for name, (experts, rows, columns) in shapes.items()}
    files: Any = SimpleNamespace(names=list(shapes), shape=shapes.__getitem__)
    assert expert_layout(text, files, "") == form


def test_experts_of_another_size_are_refused_with_both_shapes() -> None:
    text = SimpleNamespace(num_experts=8, moe_intermediate_size=16, hidden_size=64)
    files: Any = SimpleNamespace(names=[], shape=lambda name: (8, 7, 7))
    with pytest.raises(ValueError, match=r"have the shapes \(8, 7, 7\) .* config.json says \(\(8, 64, 32\)"):
        expert_layout(text, files, "")


@pytest.mark.parametrize("layout", ["in_out", "out_in", "named"])
@pytest.mark.parametrize("kind", ["gated", "row"])
def test_every_number_of_an_expert_is_on_one_rank(layout: ExpertLayout, kind: Any) -> None:
    shapes = Shapes(num_heads=1, num_groups=1, vocab_size=1, padded_vocab_size=1, expert_ranks=2)
    stack = (3, 4, 5)
    full = [torch.full(shape, -1.0) for shape in expert_shapes(layout, kind, stack, shapes, 4)]
    for rank in range(4):
        held = torch.full(stack, float(rank))
        for mine, place in expert_parts(layout, kind, held, full, shapes, rank, 4):
            assert (place == -1).all()
            place.copy_(mine)
    assert sum(tensor.numel() for tensor in full) == 4 * 3 * 4 * 5
    assert not any((tensor == -1).any() for tensor in full)
