"""AdamW over megatron's DistributedOptimizer: gradients, their sums, and the update."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

from models.compat.megatron_core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronModule,
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    ParamWithNamePredicate,
    ProcessGroupCollection,
    finalize_model_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
    parallel_state,
)
from models.freeze import part_of
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.training.distributed import device


def wrap(chunks: Iterable[MegatronModule], *, overlap_grad_reduce: bool = False) -> list[DistributedDataParallel]:
    """Return the model's chunks with flat gradient buffers, which are summed (not averaged) over data-parallel ranks.

    With overlap, buckets are reduced during the last microbatch's backward pass. Each of their parameters must get a
    gradient then (`VisionTower.always_runs`).
    """
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=False,
        average_in_collective=False,
    )
    wrapped = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]
    config = wrapped[0].config
    config.finalize_model_grads_func = finish_gradients
    if overlap_grad_reduce:
        pauses = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    return wrapped


def build_optimizer(
    ddp: list[DistributedDataParallel], settings: AdamSettings, dtype: torch.dtype
) -> MegatronOptimizer:
    """Return AdamW with its state cut over data-parallel ranks, and fp32 main weights where `dtype` is bfloat16."""
    if settings.offload_frac and device().type == "cpu":
        raise ValueError(
            f"train.optimizer_offload_fraction is {settings.offload_frac}, but there is no GPU whose memory it would "
            "save; set it to 0"
        )
    if settings.offload_frac and dtype is torch.float32:  # megatron's optimizer takes no views of trained weights
        raise ValueError(
            f"train.optimizer_offload_fraction is {settings.offload_frac} and model.dtype is float32, which keeps no "
            "main weights apart; set model.dtype to bfloat16, or the fraction to 0"
        )
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        clip_grad=settings.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=settings.offload_frac > 0,
        optimizer_offload_fraction=settings.offload_frac,
        overlap_cpu_optimizer_d2h_h2d=settings.offload_frac > 0,
    )
    return get_megatron_optimizer(config, ddp, _overrides(config, settings))


def _overrides(config: OptimizerConfig, settings: AdamSettings) -> dict[ParamKey, ParamGroupOverride] | None:
    """Return what differs for some parameters: a rate of their own, beside megatron's usual exceptions. None if nothing
    else does."""
    if not settings.part_lr:
        return None
    found = get_standard_config_overrides(config)
    for part, rate in settings.part_lr.items():
        predicate = ParamWithNamePredicate(name=part, fn=partial(_is_of_part, part))
        found[ParamKey(with_name_predicate=predicate)] = ParamGroupOverride(lr_mult=rate / settings.lr)
    return found


def _is_of_part(part: str, param: torch.nn.Parameter, name: str) -> bool:
    return part_of(name.removeprefix("module.")) == part


def make_state(optimizer: MegatronOptimizer) -> None:
    """Create the optimizer's moments, all zero, so that they can be saved before the first update."""
    for distributed in optimizer.chained_optimizers:
        groups = distributed.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        distributed._init_optimizer_states_with_dummy_values()
        for group, rate in zip(groups, rates):
            group["lr"] = rate
    continue_after(optimizer, 0)


def continue_after(optimizer: MegatronOptimizer, num_updates: int) -> None:
    """Let the next update be the one after `num_updates`. Call it when weights and moments were set.

    With `train.optimizer_offload_fraction`, megatron's optimizer is a number of others. Each counts its own updates,
    and those on the host keep a copy of the main weights, which they update.
    """
    for distributed in optimizer.chained_optimizers:
        whole = distributed.optimizer
        for part in getattr(whole, "sub_optimizers", (whole,)):
            for group in part.param_groups:
                group["step"] = num_updates
            for state in part.state.values():
                if "step" in state:  # torch's AdamW counts the updates of each parameter
                    state["step"].fill_(num_updates)
        for param, copy in getattr(whole, "gpu_params_map_cpu_copy", {}).items():
            copy.data.copy_(param.data)


def finish_gradients(
    models: list[DistributedDataParallel],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Compute every sum over ranks that gradients need. megatron's schedule calls this after the last microbatch.

    `num_tokens` is ignored: the weights of the tokens in the loss add up to 1 over all ranks already, so nothing is
    divided.
    """
    finalize_model_grads(models, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return
    for model in models:
        # each tensor-parallel rank encoded other images (models.vision.tower)
        grads = [
            param.main_grad
            for name, param in model.module.named_parameters()
            if name.startswith("vision_model.") and param.requires_grad
        ]
        if grads:
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat, group=group)
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads])):
                grad.copy_(summed.view_as(grad))
