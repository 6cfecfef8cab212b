"""Makes classifiers from the tests' models (the same folder with a head), and computes their reference scores with
transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from models.registry import load_recipe
from tests.yatt_mm.rollout.conftest import GRID


def build_classifier(source: Path, directory: Path, *, num_labels: int = 1, seed: int = 0) -> Path:
    """Write `source` again in the form of transformers' `...ForSequenceClassification`. Return the folder."""
    shutil.copytree(source, directory)
    weights = load_file(source / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith("lm_head.weight")}
    config = json.loads((source / "config.json").read_text())
    hidden_size = config["text_config"]["hidden_size"]
    weights["score.weight"] = torch.randn(num_labels, hidden_size, generator=torch.Generator().manual_seed(seed))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    name = config["architectures"][0].replace("ForConditionalGeneration", "ForSequenceClassification")
    config |= {"architectures": [name], "id2label": {str(row): f"quality {row}" for row in range(num_labels)}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def logits_of_transformers(
    source: Path, classifier: Path, prompts: Sequence[Sequence[int]], patches: np.ndarray | None
) -> list[list[float]]:
    """Return [prompt][label] logits: the head times the last hidden state of the original folder. All prompts have the
    same image."""
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).model
    head = load_file(classifier / "model.safetensors")["score.weight"]
    media = {}
    if patches is not None:
        mean, std = (np.array(values)[:, None] for values in load_recipe(source).pixel_affine(source))
        pixels = (patches.reshape(len(patches), 3, -1) / 255 - mean) / std
        media = {
            "pixel_values": torch.from_numpy(pixels.reshape(patches.shape).astype(np.float32)),
            "image_grid_thw": torch.tensor([GRID]),
        }
    found = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        kinds = (tokens == model.config.image_token_id).int()
        with torch.no_grad():
            hidden = model(input_ids=tokens, mm_token_type_ids=kinds, **media).last_hidden_state
        found.append((head @ hidden[0, -1]).tolist())
    return found
