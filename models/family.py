"""The interface of a model family: the functions that differ between families. `models/<family>/model.py` gives them as
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
    """A model family. Every function takes the family's Hugging Face config."""

    config: type[Any]
    """The config class of the family in transformers."""
    transformer_config: Callable[[Any, Parallel, torch.dtype], TransformerConfig]
    """Return the decoder's settings for megatron. Raises ValueError for a feature that the decoder does not have."""
    rules: Callable[[Any, CheckpointFiles], list[Rule]]
    """Return the weight table for the names and shapes in a checkpoint."""
    make_visual: Callable[[Any, torch.dtype], Any]
    """Return Hugging Face's vision tower, before its weights are loaded."""
    tower: type[VisionTower]
    """The class that calls the vision tower."""
    token_layout: Callable[[Any], TokenLayout]
    """Return which tokens stand for media, and their positions."""
    has_interleaved_mrope: bool = False
    """True if the frequencies of time, height and width alternate; otherwise each axis has one section."""
