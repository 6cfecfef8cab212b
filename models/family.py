"""The interface of a model family: the functions in which families differ. `models/<family>/model.py` gives it as
FAMILY."""

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
    """One family. Every function takes the family's Hugging Face config."""

    config: type[Any]
    """The class of its config in transformers."""
    transformer_config: Callable[[Any, Parallel, torch.dtype], TransformerConfig]
    """Return the decoder's settings for megatron. Raises ValueError for what the decoder cannot do."""
    rules: Callable[[Any, CheckpointFiles], list[Rule]]
    """Return the weight table for the names and shapes in a checkpoint."""
    make_visual: Callable[[Any, torch.dtype], Any]
    """Return Hugging Face's vision tower, its weights not yet loaded."""
    tower: type[VisionTower]
    """The class that calls this tower."""
    token_layout: Callable[[Any], TokenLayout]
    """Return which tokens stand for media, and their positions."""
    has_interleaved_mrope: bool = False
    """True if the frequencies of time, height and width alternate; otherwise each axis has one section."""
