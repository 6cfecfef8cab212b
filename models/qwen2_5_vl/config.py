"""From Qwen2.5-VL's Hugging Face config to megatron's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2_5_VLConfig

from models.megatron import TransformerConfig
from models.parallel import Parallel

UNFUSED = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
"""Fused kernels exist on CUDA only, and with extra packages."""


def transformer_config(hf_config: Qwen2_5_VLConfig, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """The decoder's configuration. Raises ValueError for what this version's attention cannot do."""
    text: Any = hf_config.text_config
    if text.use_sliding_window:
        raise ValueError("use_sliding_window is true in config.json; this version attends to whole sequences only")
    if text.hidden_act != "silu":
        raise ValueError(f"hidden_act is {text.hidden_act!r} in config.json; Qwen2.5-VL's decoder uses 'silu'")
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.hidden_size // text.num_attention_heads,
        ffn_hidden_size=text.intermediate_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        mrope_section=list(text.rope_parameters["mrope_section"]),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=parallel.pp > 1,
        # demanded by the config check for variable_seq_lengths, also without experts
        moe_token_dispatcher_type="alltoall",
        # weights are loaded, not initialised; marks that initialisation would set are set by the model
        use_cpu_initialization=True,
        perform_initialization=False,
        # the loss is a sum with global weights: nothing divides gradients
        calculate_per_token_loss=True,
        **UNFUSED,
    )
