"""Qwen2.5-VL: windows in the vision tower, M-RoPE in sections, biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2_5_VLConfig

from models.family import Family
from models.qwen2_5_vl.config import transformer_config
from models.qwen2_5_vl.mapping import rules
from models.qwen2_5_vl.tower import Tower, make_visual


def tokens_per_second(hf_config: Qwen2_5_VLConfig) -> float:
    """How far a second of video moves the temporal position."""
    vision: Any = hf_config.vision_config
    return float(vision.tokens_per_second)


FAMILY = Family(
    config=Qwen2_5_VLConfig,
    transformer_config=transformer_config,
    rules=rules,
    make_visual=make_visual,
    tower=Tower,
    has_interleaved_mrope=False,
    tokens_per_second=tokens_per_second,
)
