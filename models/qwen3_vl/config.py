"""Converts Qwen3-VL's Hugging Face config to megatron's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3VLConfig

from models.compat.megatron_core import TransformerConfig
from models.decoder.config import decoder_config
from models.layout.parallel import Parallel


def transformer_config(hf_config: Qwen3VLConfig, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """Return the decoder's configuration: norms on queries and keys, and a separate head size. Raises ValueError for
    biases."""
    text: Any = hf_config.text_config
    if text.attention_bias:
        raise ValueError("attention_bias is true in config.json; no released Qwen3-VL has these biases, nor has ours")
    return decoder_config(text, parallel, dtype, kv_channels=text.head_dim, qk_layernorm=True)
