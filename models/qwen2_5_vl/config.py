"""Converts Qwen2.5-VL's Hugging Face config to megatron's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2_5_VLConfig

from models.compat.megatron_core import TransformerConfig
from models.decoder.config import decoder_config
from models.layout.parallel import Parallel


def transformer_config(hf_config: Qwen2_5_VLConfig, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """Return the decoder's configuration. Raises ValueError for a config that this version's attention cannot
    compute."""
    text: Any = hf_config.text_config
    if text.use_sliding_window:
        raise ValueError("use_sliding_window is true in config.json; this version attends to whole sequences only")
    head_size = text.hidden_size // text.num_attention_heads
    return decoder_config(text, parallel, dtype, kv_channels=head_size, add_qkv_bias=True)
