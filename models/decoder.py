"""The language model of every family: megatron's GPTModel with packed attention, without its head."""

from __future__ import annotations

from typing import Any

import torch

from models.attention import PackedCoreAttention
from models.megatron import (
    ColumnParallelLinear,
    GPTModel,
    RowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    VocabParallelEmbedding,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    set_tensor_model_parallel_attributes,
)


class Decoder(GPTModel):
    """GPTModel that stops before the head: `VisionLanguageModel` applies it to scored tokens only."""

    def _postprocess(self, hidden_states: torch.Tensor, **unused: Any) -> torch.Tensor:
        return hidden_states


class RMSNorm(torch.nn.Module):
    """Like Hugging Face's; megatron's own refuses sequence parallelism, where the weight needs only a mark."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = torch.nn.functional.rms_norm(hidden.float(), (hidden.shape[-1],), eps=self.eps)
        return normal.to(hidden.dtype) * self.weight


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """This stage's layers: megatron's local ones, with our norms and attention."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    num_layers = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RMSNorm)


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark weights that are cut over ranks: without initialisation megatron does not, and then the gradient
    norm silently counts the first rank's part only."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dim = 0
        elif isinstance(module, RowParallelLinear):
            dim = 1
        else:
            continue
        weight = module.weight
        if weight is not None and "tensor_model_parallel" not in vars(weight):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
