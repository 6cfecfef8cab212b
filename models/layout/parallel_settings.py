"""The settings of megatron's TransformerConfig that follow from a layout, the same for every family."""

from __future__ import annotations

from typing import Any, Literal

import torch

from models.compat.megatron_core import TransformerConfig
from models.layout.parallel import Parallel

Recompute = Literal["none", "full", "selective"]
"""Which activations the backward pass computes again: none, those of whole layers, or only those of attention."""


def parallel_settings(parallel: Parallel, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of TransformerConfig that follow from the layout."""
    return {
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.sequence_parallel,
        "context_parallel_size": parallel.cp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": parallel.pp > 1,
        # megatron's default confuses the shapes of microbatches when they differ and stages are virtual
        "overlap_p2p_comm": parallel.vpp > 1,
        "batch_p2p_comm": parallel.vpp == 1,
        # the config check for variable_seq_lengths demands this, also without experts
        "moe_token_dispatcher_type": "alltoall",
    }


def set_recompute(config: TransformerConfig, recompute: Recompute) -> None:
    """Recompute activations to save memory. Call it before the model is built."""
    if recompute == "none":
        return
    config.recompute_granularity = recompute
    if recompute == "full":
        config.recompute_method = "uniform"
        config.recompute_num_layers = 1
