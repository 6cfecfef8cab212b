"""Qwen2.5-VL: windows in the vision tower, M-RoPE in sections, biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2_5_VLConfig

from models.family import Family
from models.qwen2_5_vl.config import transformer_config
from models.qwen2_5_vl.mapping import rules
from models.qwen2_5_vl.tower import Tower, make_visual
from models.sequence.media_tokens import TokenLayout, qwen_token_layout


def token_layout(hf_config: Qwen2_5_VLConfig) -> TokenLayout:
    """Return the layout in which a video is one span, whose temporal positions follow its time."""
    vision: Any = hf_config.vision_config
    return qwen_token_layout(hf_config, tokens_per_second=float(vision.tokens_per_second))


FAMILY = Family(
    config=Qwen2_5_VLConfig,
    transformer_config=transformer_config,
    rules=rules,
    make_visual=make_visual,
    tower=Tower,
    token_layout=token_layout,
)
