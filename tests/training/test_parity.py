"""The megatron model against Hugging Face transformers on the same samples, in every layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from models.parallel import Parallel
from tests.training import jobs
from tests.training.ranks import RankPool
from tests.training.tiny import IMAGE_TOKEN, MEAN, PATCH_VALUES, STD, make_samples
from yatt_mm.training.samples import TrainSample

LAYOUTS = {
    "tp1": Parallel(),
    "tp2": Parallel(tp=2),
    "tp2-sp": Parallel(tp=2, sp=True),
    "pp2": Parallel(pp=2),
    "dp2": Parallel(dp=2),
    "tp2-pp2": Parallel(tp=2, pp=2),
    "tp4-sp": Parallel(tp=4, sp=True),
}
TIED_LAYOUTS = ("tp1", "pp2", "tp2-pp2")


@dataclass
class Reference:
    """What transformers says about the samples."""

    logprobs: list[np.ndarray]
    entropy: float
    gradients: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def reference(untied_folder: Path) -> Reference:
    return compute_reference(untied_folder)


@pytest.fixture(scope="module")
def tied_reference(tied_folder: Path) -> Reference:
    return compute_reference(tied_folder)


def compute_reference(folder: Path) -> Reference:
    """One sample at a time through the Hugging Face model, with pixel values made as its processor does."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    logprobs, loss, weighted_entropy = [], torch.zeros(()), 0.0
    for sample in make_samples():
        distribution = model(**model_inputs(sample)).logits[0, :-1].log_softmax(-1)
        labels = torch.from_numpy(sample.token_ids[1:])
        mask = torch.from_numpy(sample.loss_mask[1:])
        scored = distribution.gather(1, labels[:, None])[:, 0][mask]
        entropy = -(distribution.exp() * distribution).sum(-1)[mask]
        weights = torch.from_numpy(sample.columns["weights"])
        loss = loss - (weights * (scored + 0.3 * entropy)).sum()
        logprobs.append(scored.detach().numpy())
        weighted_entropy += float((weights * entropy).sum().detach())
    loss.backward()
    saved = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): param
        for name, param in model.named_parameters()
    }
    return Reference(logprobs, weighted_entropy, {name: param.grad.numpy() for name, param in saved.items()})


def model_inputs(sample: TrainSample) -> dict[str, torch.Tensor]:
    """Inputs of the Hugging Face model for one sample."""
    tokens = torch.from_numpy(sample.token_ids)[None]
    inputs = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE_TOKEN).int()}
    if sample.patches:
        raw = np.concatenate(sample.patches).reshape(-1, 3, PATCH_VALUES // 3)
        mean, std = (np.array(values)[:, None] for values in (MEAN, STD))
        pixels = ((raw / 255 - mean) / std).reshape(-1, PATCH_VALUES)
        inputs["pixel_values"] = torch.from_numpy(pixels.astype(np.float32))
        inputs["image_grid_thw"] = torch.tensor(sample.grid_thw)
    return inputs


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_equals_transformers_and_exports_its_own_bits(
    name: str, ranks: RankPool, untied_folder: Path, reference: Reference
) -> None:
    check_layout_against(reference, untied_folder, ranks, LAYOUTS[name])


@pytest.mark.parametrize("name", TIED_LAYOUTS)
def test_a_tied_head_equals_transformers_too(
    name: str, ranks: RankPool, tied_folder: Path, tied_reference: Reference
) -> None:
    check_layout_against(tied_reference, tied_folder, ranks, LAYOUTS[name])


def check_layout_against(reference: Reference, folder: Path, ranks: RankPool, parallel: Parallel) -> None:
    results = ranks.run(parallel.world_size, jobs.measure, folder, parallel)
    check_logprobs(reference, results, parallel)
    original = load_file(folder / "model.safetensors")
    for result in results:
        assert result["weights"].keys() == original.keys()
        for name, tensor in original.items():
            assert np.array_equal(result["weights"][name], tensor), name
    check_gradients(reference.gradients, results[0]["gradients"])


def check_logprobs(reference: Reference, results: list[dict[str, Any]], parallel: Parallel) -> None:
    counting = [result for result in results if result["is_loss_rank"]]
    assert len(counting) == parallel.dp
    found: dict[int, np.ndarray] = {}
    for replica, result in enumerate(counting):
        for group, values in zip(jobs.GROUPS[replica :: parallel.dp], result["logprobs"], strict=True):
            found.update(zip(group, values, strict=True))
    difference = max(np.abs(found[i] - wanted).max() for i, wanted in enumerate(reference.logprobs))
    assert difference < 2e-5
    assert sum(result["entropy"] for result in counting) == pytest.approx(reference.entropy, rel=1e-5)


def check_gradients(wanted: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    worst = max(np.abs(found[name] - wanted[name]).max() / np.abs(wanted[name]).max() for name in found)
    assert worst < 1e-5
