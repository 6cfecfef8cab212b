"""The linear layers of a model that LoRA adapts: those of the decoder's attention and MLPs, and those of the tower.

Embedding, head, router and experts get no adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from models.weights.load import ExpertStack, Match, WeightTable, global_name, global_names

OF_EXPERTS = ("language.gate_proj", "language.up_proj", "language.down_proj")
"""The targets that name layers of experts, where a model has experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer of this rank, and the layers of Hugging Face's model that it is made of."""

    name: str
    """Its name in megatron, with the global layer number."""
    module: torch.nn.Module
    match: Match
    """That of its weight."""
    targets: tuple[str, ...]
    """For each of the weight's tensors in Hugging Face's model, what `train.lora.targets` calls it."""

    def chosen(self, targets: Collection[str]) -> tuple[bool, ...]:
        """Return for each of these tensors True if it is a target, by its own name or as a layer of a part."""
        return tuple(target in targets or target.partition(".")[0] in targets for target in self.targets)


def linears(chunk: torch.nn.Module, table: WeightTable, part_of: Callable[[str], str]) -> Iterator[Linear]:
    """Yield the linear layers of one of this rank's chunks that LoRA can adapt. `part_of` gives the part of the model
    that a parameter belongs to."""
    for local, module in chunk.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or ".experts." in local:
            continue
        name = global_name(chunk, local)
        match = table.match(f"{name}.weight")
        is_of_decoder = match.kind in ("col", "row", "qkv", "gated")
        if is_of_decoder or (name.startswith("vision_model.") and isinstance(module, torch.nn.Linear)):
            targets = tuple(f"{part_of(name)}.{_short(hf_name)}" for hf_name in match.names)
            yield Linear(name=name, module=module, match=match, targets=targets)


def check_targets(targets: Iterable[str], found: Iterable[Linear], chunks: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError, on all ranks, unless the model has every target. All ranks of the world must call this
    together; `found` are the layers of each rank."""
    has_experts = any(isinstance(held, ExpertStack) for chunk in chunks for _, held in global_names(chunk))
    mine = ({target for linear in found for target in linear.targets}, has_experts)
    everywhere = [mine] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    names = {name for of_rank, _ in everywhere for name in of_rank}
    parts = {name.partition(".")[0] for name in names}
    if any(experts for _, experts in everywhere):
        names -= set(OF_EXPERTS)
    for target in targets:
        if target in names | parts:
            continue
        why = "; experts, and the MLPs in their places, get no adapters" if target in OF_EXPERTS else ""
        of_part = sorted(name for name in names if name.startswith(f"{target.partition('.')[0]}."))
        raise ValueError(
            f"train.lora.targets names {target}, a layer that the model does not have, or that cannot be adapted{why}; "
            f"wanted {', '.join([*sorted(parts), *(of_part or sorted(names))])}"
        )


def _short(hf_name: str) -> str:
    """Return what users call a layer: the last part of its name, with what is before it if that is a number."""
    *before, last = hf_name.removesuffix(".weight").split(".")
    return f"{before[-1]}.{last}" if last.isdigit() else last
