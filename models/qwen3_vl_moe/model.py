"""Qwen3-VL-MoE: Qwen3-VL with experts in most layers."""

from __future__ import annotations

from transformers import Qwen3VLMoeConfig

from models.family import Family
from models.qwen3_vl_moe.config import transformer_config
from models.qwen3_vl_moe.mapping import rules
from models.qwen3_vl_moe.tower import Tower, make_visual
from models.sequence.media_tokens import qwen_token_layout

FAMILY = Family(
    config=Qwen3VLMoeConfig,
    transformer_config=transformer_config,
    rules=rules,
    make_visual=make_visual,
    tower=Tower,
    token_layout=qwen_token_layout,
    has_interleaved_mrope=True,
)
