"""The decoder's settings that all families share, as megatron's TransformerConfig.

A family's `config` module adds its own settings: biases, norms, the size of a head, experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from models.compat.megatron_core import TransformerConfig
from models.layout.parallel import Parallel
from models.layout.parallel_settings import parallel_settings

UNFUSED = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
"""Fused kernels are off, because they exist on CUDA only and with extra packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP. The weights of a token's experts sum to one; there is no auxiliary
    loss."""

    num: int
    per_token: int
    ffn_hidden_size: int
    """The hidden size of each expert."""
    is_in_layer: Sequence[bool]
    """[num_layers] True for layers with experts; the others have a dense MLP."""

    def settings(self, parallel: Parallel) -> dict[str, Any]:
        """Return megatron's settings. Raises ValueError for one expert per token, whose weight would have no
        gradient."""
        if self.per_token < 2:
            raise ValueError(
                f"num_experts_per_tok is {self.per_token} in config.json; this version's router needs at least 2"
            )
        return {
            "num_moe_experts": self.num,
            "moe_router_topk": self.per_token,
            "moe_ffn_hidden_size": self.ffn_hidden_size,
            "moe_layer_freq": [int(has_experts) for has_experts in self.is_in_layer],
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": parallel.ep,
            "expert_tensor_parallel_size": parallel.etp,
        }


def decoder_config(
    text: Any,
    parallel: Parallel,
    dtype: torch.dtype,
    *,
    kv_channels: int,
    add_qkv_bias: bool = False,
    qk_layernorm: bool = False,
    experts: Experts | None = None,
) -> TransformerConfig:
    """Return the decoder's configuration from the `text_config` of a Hugging Face config.

    `kv_channels`: size of an attention head. Raises ValueError for an activation that is not SwiGLU's.
    """
    if text.hidden_act != "silu":
        raise ValueError(f"hidden_act is {text.hidden_act!r} in config.json; this version's decoders use 'silu'")
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=kv_channels,
        ffn_hidden_size=text.intermediate_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=add_qkv_bias,
        qk_layernorm=qk_layernorm,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        # with one axis this is RoPE over the places of tokens
        mrope_section=list(text.rope_parameters.get("mrope_section", (kv_channels // 2, 0, 0))),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # weights are loaded, not initialised; the model sets the marks that initialisation would set
        use_cpu_initialization=True,
        perform_initialization=False,
        # the loss is a sum with global weights, so gradients are not divided
        calculate_per_token_loss=True,
        **parallel_settings(parallel, dtype),
        **UNFUSED,
        **(experts.settings(parallel) if experts else {}),
    )
