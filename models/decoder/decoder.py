"""The language model of every family: megatron's GPTModel with packed attention, without its head."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from models.compat.megatron_core import (
    ColumnParallelLinear,
    GPTModel,
    ModuleSpec,
    RowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    VocabParallelEmbedding,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    set_tensor_model_parallel_attributes,
)
from models.decoder.core_attention import PackedCoreAttention


class Decoder(GPTModel):
    """A GPTModel that stops before the head, because `VisionLanguageModel` applies the head only to scored tokens (see
    `models.sequence.packing`)."""

    post_process: bool

    def add_deepstack(self, num_layers: int) -> None:
        """Let the first `num_layers` layers add features of the vision tower to their outputs. The features are the
        argument `context` [T, 1, num_layers * h] of megatron's decoder, one slice per layer; None adds nothing."""
        assert len(self.decoder.layers) >= num_layers
        for number, layer in enumerate(self.decoder.layers[:num_layers]):
            layer.register_forward_hook(_AddSlice(number, self.config.hidden_size), with_kwargs=True)

    def drop_output_layer(self) -> None:
        """Remove the output layer, if this stage has one. Nothing may be tied to it."""
        assert not self.share_embeddings_and_output_weights
        if self.post_process:
            del self.output_layer
            self.post_process = False  # megatron would look for it in checkpoints

    def _postprocess(self, hidden_states: torch.Tensor, **unused: Any) -> torch.Tensor:
        return hidden_states


class _AddSlice:
    """A forward hook that adds to a layer's output that layer's slice of the visual features, which come as
    `context`."""

    def __init__(self, number: int, size: int) -> None:
        self.columns = slice(number * size, (number + 1) * size)

    def __call__(self, layer: Any, args: Any, kwargs: Any, output: Any) -> Any:
        context = kwargs["context"]
        return output if context is None else (output[0] + context[..., self.columns], *output[1:])


class RMSNorm(torch.nn.Module):
    """RMSNorm like Hugging Face's. megatron's own norm refuses sequence parallelism, which needs only a mark on the
    weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = torch.nn.functional.rms_norm(hidden.float(), (hidden.shape[-1],), eps=self.eps)
        return normal.to(hidden.dtype) * self.weight


def block_spec(config: TransformerConfig, chunk: int) -> TransformerBlockSubmodules:
    """Return the layers of one of this stage's chunks: megatron's local ones, with the norms and the attention of this
    project."""
    dense, sparse = _layer_spec(config, None), _layer_spec(config, config.num_moe_experts)
    pattern = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    assert isinstance(pattern, list)
    begin = get_transformer_layer_offset(config, vp_stage=chunk)
    end = begin + get_num_layers_to_build(config, vp_stage=chunk)
    specs = [sparse if has_experts else dense for has_experts in pattern[begin:end]]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def uses_transformer_engine() -> bool:
    """Return True if the layers are Transformer Engine's: it is installed, and there is a GPU to run it."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def _layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    if uses_transformer_engine():
        # norms are fused into the linear layers behind them (models.weights.rules has both names); experts stay one by
        # one
        fused = get_gpt_layer_with_transformer_engine_spec(num_experts, qk_layernorm=config.qk_layernorm)
        fused.submodules.self_attention.submodules.core_attention = PackedCoreAttention
        return fused
    spec = get_gpt_layer_local_spec(num_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def mark_experts(model: torch.nn.Module) -> None:
    """Mark experts, so that their gradients are summed over the ranks that hold the same experts.

    megatron marks them only with expert parallelism. Without a mark they would be summed over data-parallel ranks. That
    is wrong if experts are cut differently from other layers, and a checkpoint would have another form.
    """
    for name, param in model.named_parameters():
        if ".local_experts." in name:
            param.allreduce = False  # type: ignore[attr-defined]


def mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark weights that are cut over ranks. megatron does so only when it initialises them. Without marks the gradient
    norm silently counts only the first rank's part."""
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
