"""What a model family says of itself. `models/<family>/model.py` gives it as FAMILY; the rest is the same for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from models.compat.megatron_core import TransformerConfig
from models.layout.parallel import Parallel
from models.sequence.media_tokens import TokenLayout
from models.vision.tower import VisionTower
from models.weights.checkpoint_files import CheckpointFiles
from models.weights.load import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Every function takes the family's Hugging Face config."""

    config: type[Any]
    """Its class in transformers."""
    transformer_config: Callable[[Any, Parallel, torch.dtype], TransformerConfig]
    """The decoder's settings for megatron. Raises ValueError for what the decoder cannot do."""
    rules: Callable[[Any, CheckpointFiles], list[Rule]]
    """Its tensors, by the names and shapes that a checkpoint has."""
    make_visual: Callable[[Any, torch.dtype], Any]
    """Hugging Face's vision tower, its weights not yet loaded."""
    tower: type[VisionTower]
    """How that tower is called."""
    token_layout: Callable[[Any], TokenLayout]
    """Which tokens stand for media, and what positions they have."""
    has_interleaved_mrope: bool = False
    """Frequencies of time, height and width alternate; otherwise each axis has one section."""
