"""Freezes parts of the model: they get no gradient and no optimizer state, and are exported like the others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

import torch

from models.decoder.value_head import NAME

Part = Literal["tower", "merger", "language"]
"""A part of the model. tower: the vision encoder. merger: the layers that turn patches into token embeddings. language:
everything else."""

PARTS: tuple[Part, ...] = get_args(Part)


def part_of(name: str) -> Part:
    """Return the part of the model that a parameter of `VisionLanguageModel` belongs to. `name` is its name in that
    module."""
    if not name.startswith("vision_model."):
        return "language"
    return "merger" if "merger" in name or "projector" in name else "tower"


def freeze(model: torch.nn.ModuleList, parts: Collection[Part]) -> None:
    """Freeze parts of a pipeline stage's chunks, but never the head of a critic, which begins at 0.

    Raises ValueError if no part would be left to train."""
    if set(parts) >= set(PARTS):
        raise ValueError(f"train.freeze names {', '.join(PARTS)}: all of the model; leave one of them out")
    for chunk in model:
        for name, param in chunk.named_parameters():
            if part_of(name) in parts and not name.startswith(NAME):
                param.requires_grad_(False)
