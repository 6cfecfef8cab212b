"""Converts Qwen3-VL-MoE's Hugging Face config to megatron's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3VLMoeConfig

from models.compat.megatron_core import TransformerConfig
from models.decoder.config import Experts, decoder_config
from models.layout.parallel import Parallel


def transformer_config(hf_config: Qwen3VLMoeConfig, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """Return the decoder's configuration: Qwen3-VL's, with experts. Raises ValueError for biases or a single expert."""
    text: Any = hf_config.text_config
    if text.attention_bias:
        raise ValueError("attention_bias is true in config.json; no released Qwen3-VL has these biases, nor has ours")
    if not vars(text).get("norm_topk_prob", True):
        raise ValueError("norm_topk_prob is false in config.json; this version's router gives weights that sum to one")
    experts = Experts(
        num=text.num_experts,
        per_token=text.num_experts_per_tok,
        ffn_hidden_size=text.moe_intermediate_size,
        is_in_layer=has_experts(text),
    )
    return decoder_config(text, parallel, dtype, kv_channels=text.head_dim, qk_layernorm=True, experts=experts)


def has_experts(text: Any) -> list[bool]:
    """Return [num_layers] True for layers with experts; the others have a dense MLP."""
    return [
        layer not in text.mlp_only_layers and (layer + 1) % text.decoder_sparse_step == 0
        for layer in range(text.num_hidden_layers)
    ]
