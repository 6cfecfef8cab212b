"""The time of an update: its operations divided by what the devices can do, and the real balance of the step's samples
between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yatt_mm.simulator.config import SimulationConfig
from yatt_mm.simulator.workload import SimulatedPrompt
from yatt_mm.training.balance import max_over_mean, spread
from yatt_mm.training.microbatches import Limits, WorkGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTime:
    """The time of one step's update."""

    seconds: float
    imbalance: float
    """The largest work of a replica over the mean."""


def update_time(config: SimulationConfig, prompts: Sequence[SimulatedPrompt], num_devices: int) -> UpdateTime:
    """Return the time that the update of a batch takes on `num_devices` devices."""
    training, work = config.training, config.workload
    groups = [_work(config, prompt) for prompt in prompts]
    replicas = spread(
        groups, num_devices // training.devices_per_replica, Limits(max_tokens=training.max_tokens_per_microbatch)
    )
    loads = [sum(piece.cost for piece in pieces) for pieces in replicas]
    num_tokens = sum(sum(prompt.response_lengths) + work.group_size * work.prompt_tokens.value for prompt in prompts)
    flops = num_tokens * training.flops_per_token.value
    flops += len(prompts) * work.patches_per_prompt.value * training.flops_per_patch.value
    speed = training.reference_devices * training.peak_flops.value * training.mfu.value
    speed *= (num_devices / training.reference_devices) ** training.scaling_exponent.value
    imbalance = max_over_mean(loads)
    return UpdateTime(seconds=flops / speed * imbalance, imbalance=imbalance)


def _work(config: SimulationConfig, prompt: SimulatedPrompt) -> WorkGroup:
    work, training = config.workload, config.training
    num_tokens = tuple(int(work.prompt_tokens.value) + length for length in prompt.response_lengths)
    num_patches = int(work.patches_per_prompt.value)
    return WorkGroup(
        position=prompt.position,
        num_tokens=num_tokens,
        num_patches=num_patches,
        row_costs=tuple(int(tokens * training.flops_per_token.value) for tokens in num_tokens),
        shared_cost=int(num_patches * training.flops_per_patch.value),
    )
