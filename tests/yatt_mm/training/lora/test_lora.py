"""Tests of LoRA's numbers: in transformers with the exported folders, in every layout, and in every division into
microbatches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from models.layout.parallel import Parallel
from models.lora.adapter import Adapter
from models.lora.peft_folder import FOLDER, PREFIX
from models.lora.targets import Linear
from models.weights.load import Match
from tests.models import parity
from tests.models.layouts import LAYOUTS, layouts_for, quick_first
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.lora.lora_jobs import EVERYWHERE, score, splits
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import FORMS, build_folder, make_samples


def in_transformers(folder: Path, export: Path) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Return log-probabilities of all samples, and gradients of the adapters by PEFT's names, of the base model in
    transformers with the exported adapter, as PEFT applies it."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.requires_grad_(False)
    config = json.loads((export / FOLDER / "adapter_config.json").read_text())
    tensors = load_file(export / FOLDER / "adapter_model.safetensors")
    matrices = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    scale = config["lora_alpha"] / config["r"]
    for layer in config["target_modules"]:
        a, b = (matrices[f"{PREFIX}{layer}.lora_{matrix}.weight"] for matrix in "AB")
        linear = model.get_submodule(layer)
        assert isinstance(linear, torch.nn.Linear)
        linear.register_forward_hook(lambda _, inputs, output, a=a, b=b: output + inputs[0] @ a.T @ b.T * scale)
    assert len(tensors) == 2 * len(config["target_modules"])
    logprobs, loss = scored_by(model)
    loss.backward()
    gradients = {name: param.grad.numpy() for name, param in matrices.items() if param.grad is not None}
    return logprobs, gradients


def scored_by(model: Any) -> tuple[list[np.ndarray], torch.Tensor]:
    logprobs, loss, form = [], torch.zeros(()), FORMS[model.config.model_type]
    for sample in make_samples(form):
        inputs = parity.model_inputs(sample, form)
        logits = model(**inputs, **parity.positions_of(model, inputs)).logits
        distribution = logits[0, :-1].log_softmax(-1)
        mask = torch.from_numpy(sample.loss_mask[1:])
        scored = distribution.gather(1, torch.from_numpy(sample.token_ids[1:])[:, None])[:, 0][mask]
        entropy = -(distribution.exp() * distribution).sum(-1)[mask]
        assert sample.sampled is not None
        loss = loss + jobs.weighted_sum(scored, entropy, torch.from_numpy(sample.sampled.weights))
        logprobs.append(scored.detach().numpy())
    return logprobs, loss


FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl")
CASES = [(family, layout) for family in FAMILIES for layout in layouts_for(family)]
QUICK = {"qwen2_5_vl tp2", "qwen2_5_vl tp2-pp2-sp", "qwen3_vl_moe tp2-sp-ep2"}


@pytest.fixture(scope="module")
def exports(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives a family's folder, and what one rank computes and writes."""
    done: dict[str, tuple[Path, Path, dict[str, Any]]] = {}

    def of(family: str) -> tuple[Path, Path, dict[str, Any]]:
        if family not in done:
            root = tmp_path_factory.mktemp(family)
            folder = build_folder(root / "model", family)
            done[family] = folder, root / "hf", ranks.run(1, score, folder, Parallel(), EVERYWHERE, root / "hf")[0]
        return done[family]

    return of


@pytest.mark.parametrize("family", quick_first(FAMILIES, ("qwen2_5_vl",)))
def test_the_exported_adapter_on_the_base_model_is_the_merged_model_in_transformers(family: str, exports: Any) -> None:
    folder, export, found = exports(family)
    logprobs, gradients = in_transformers(folder, export)
    merged = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32, attn_implementation="sdpa")
    of_base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        of_merged, plain = scored_by(merged)[0], scored_by(of_base)[0]
    for number, wanted in enumerate(logprobs):
        assert np.abs(of_merged[number] - wanted).max() < 1e-5
        assert np.abs(found["logprobs"][number] - wanted).max() < 1e-5
        assert np.abs(plain[number] - wanted).max() > 1e-3
    base, weights = (load_file(path / "model.safetensors") for path in (folder, export))
    matrices = load_file(export / FOLDER / "adapter_model.safetensors")
    layers = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in matrices}
    in_checkpoint = {parity.saved_name(f"{layer}.weight", base.keys()): layer for layer in layers}
    for name, weight in weights.items():
        if name not in in_checkpoint:
            assert torch.equal(weight, base[name])
            continue
        a, b = (matrices[f"{PREFIX}{in_checkpoint[name]}.lora_{matrix}.weight"] for matrix in "AB")
        assert (weight - (base[name] + 1.5 * b @ a)).abs().max() < 1e-6
    for name, gradient in found["gradients"].items():
        wanted = sum(gradients[f"{PREFIX}{one}"] for one in sharing(name, in_checkpoint))
        assert np.abs(gradient - wanted).max() < 1e-5 * np.abs(wanted).max(), name
    assert found["gradients"].keys() == {
        f"{name.removesuffix('.weight')}.lora_{matrix}.weight" for name in in_checkpoint for matrix in "AB"
    }


def sharing(name: str, in_checkpoint: dict[str, str]) -> list[str]:
    """Return the matrices of PEFT's folder whose gradients add up to that of a matrix of the trainer: the layers that
    are one weight there have one A."""
    layer, _, of_layer = name.rpartition(".lora_")
    peft_name = f"{in_checkpoint[layer + '.weight']}.lora_{of_layer}"
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for part in group:
            if f".{part}.lora_A" in peft_name and ".language_model." in peft_name:
                return [peft_name.replace(part, other) for other in group]
    return [peft_name]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if f"{family} {layout}" in QUICK else pytest.mark.parity)
        for family, layout in CASES
        if layout != "tp1"
    ],
)
def test_log_probabilities_and_gradients_do_not_depend_on_the_layout(
    family: str, layout: str, ranks: RankPool, exports: Any
) -> None:
    folder, _, wanted = exports(family)
    parallel = LAYOUTS[layout]
    num_compared = 0
    for found in ranks.run(parallel.world_size, score, folder, parallel, EVERYWHERE, None):
        for number, logprobs in found["logprobs"].items():
            assert np.abs(logprobs - wanted["logprobs"][number]).max() < 1e-5
            num_compared += 1
        assert found["gradients"].keys() == wanted["gradients"].keys()
        for name, gradient in wanted["gradients"].items():
            assert np.abs(found["gradients"][name] - gradient).max() < 1e-5 * np.abs(gradient).max(), name
    assert num_compared >= 8


def test_gradients_do_not_depend_on_the_division_into_microbatches(ranks: RankPool, untied_folder: Path) -> None:
    together, *others = ranks.run(1, splits, untied_folder)[0]
    for found in others:
        for name, gradient in together.items():
            assert np.abs(found[name] - gradient).max() < 1e-5 * np.abs(gradient).max(), name


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_exported_adapter_and_merges_it_to_the_exported_model(family: str, exports: Any) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra parity")
    folder, export, found = exports(family)
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model = peft.PeftModel.from_pretrained(base, export / FOLDER)
    with torch.no_grad():
        for number, logprobs in enumerate(scored_by(model.get_base_model())[0]):
            assert np.abs(found["logprobs"][number] - logprobs).max() < 1e-5
    merged = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32, attn_implementation="sdpa")
    ours, theirs = merged.state_dict(), model.merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max() for name in ours) < 1e-6


def test_an_adapter_sees_the_inputs_behind_the_norm_that_its_layer_contains() -> None:
    """Transformer Engine's layers are not here: a layer of torch has their norm."""
    layer = torch.nn.Linear(6, 5, bias=False)
    layer.register_parameter("layer_norm_weight", torch.nn.Parameter(torch.rand(6)))
    adapter = Adapter(
        linear=Linear(name="fused", module=layer, match=Match(("fused.weight",), "rep", True, (), None), targets=()),
        a=torch.nn.Parameter(torch.rand(2, 6)),
        b=torch.nn.Parameter(torch.rand(5, 2)),
        is_masked=False,
        scale=3.0,
        is_sequence_parallel=False,
        norm_eps=1e-3,
    )
    inputs = torch.rand(4, 1, 6)
    normal = inputs / (inputs.square().mean(-1, keepdim=True) + 1e-3).sqrt() * layer.get_parameter("layer_norm_weight")
    wanted = normal @ (adapter.merged(layer.weight) - layer.weight).T
    assert torch.allclose(adapter.product(inputs), wanted, atol=1e-6)
