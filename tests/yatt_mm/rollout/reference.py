"""Computes with transformers the log-probabilities of responses that an engine sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from models.registry import load_recipe
from tests.yatt_mm.rollout.conftest import GRID


def of_transformers(
    folder: Path, prompt: Sequence[int], patches: np.ndarray, sampled: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return [response][token] log-probabilities. Each response takes one pass over the prompt, which has one image,
    and the response."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    mean, std = (np.array(values)[:, None] for values in load_recipe(folder).pixel_affine(folder))
    pixels = (patches.reshape(len(patches), 3, -1) / 255 - mean) / std
    found: list[list[float]] = []
    for response in sampled:
        tokens = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            logits = model(
                input_ids=tokens,
                mm_token_type_ids=(tokens == model.config.image_token_id).int(),
                pixel_values=torch.from_numpy(pixels.reshape(patches.shape).astype(np.float32)),
                image_grid_thw=torch.tensor([GRID]),
            ).logits
        distribution = logits[0, -len(response) - 1 : -1].log_softmax(-1)
        found.append(distribution.gather(1, torch.tensor(response)[:, None])[:, 0].tolist())
    return found
