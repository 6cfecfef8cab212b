"""Qwen3-VL: deepstack features in the first layers, interleaved M-RoPE, norms on queries and keys."""

from __future__ import annotations

from transformers import Qwen3VLConfig

from models.family import Family
from models.qwen3_vl.config import transformer_config
from models.qwen3_vl.mapping import rules
from models.qwen3_vl.tower import Tower, make_visual
from models.sequence.media_tokens import qwen_token_layout

FAMILY = Family(
    config=Qwen3VLConfig,
    transformer_config=transformer_config,
    rules=rules,
    make_visual=make_visual,
    tower=Tower,
    token_layout=qwen_token_layout,
    has_interleaved_mrope=True,
)
