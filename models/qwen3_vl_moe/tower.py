"""Qwen3-VL-MoE's vision tower. It equals that of Qwen3-VL, but has another class in transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3VLMoeConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from models.qwen3_vl.tower import Tower

__all__ = ["Tower", "make_visual"]


def make_visual(hf_config: Qwen3VLMoeConfig, dtype: torch.dtype) -> Any:
    """Return Hugging Face's module, before its weights are loaded."""
    return Qwen3VLMoeVisionModel._from_config(hf_config.vision_config, dtype=dtype)
