"""Loads weights from a Hugging Face checkpoint into megatron's parameters, by the family's table of rules.

The table is in `models.<family>.mapping`. `models.weights.slicing` knows how each kind of tensor is cut over the ranks,
and `models.weights.export` uses the same table in the other direction.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from models.compat.megatron_core import parallel_state
from models.weights.checkpoint_files import CheckpointFiles
from models.weights.expert_stack import ExpertLayout, ExpertStack, expert_parts, expert_shapes
from models.weights.slicing import Kind, Shape, Shapes, common_parts, full_shapes

Held = torch.Tensor | ExpertStack
"""The object that a rank holds under one of megatron's names: a parameter or a stack of experts."""
LORA_A, LORA_B = "lora_A", "lora_B"
"""The names of the matrices of an adapter in its layer."""
OF_ADAPTERS = (f".{LORA_A}", f".{LORA_B}")


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a family's table: which Hugging Face tensors make which parameter of the megatron model, and how."""

    megatron: str
    """The name in megatron with the global layer number; it may hold {layer} and {rest}."""
    hugging_face: Sequence[str]
    """The names in the checkpoint; none for a parameter that begins anew."""
    kind: Kind
    is_exported: bool = True
    copies: Sequence[str] = ()
    """Other names under which the checkpoint stores the same tensor again. They are written but not read."""
    experts: ExpertLayout | None = None
    """The form in which the checkpoint keeps the experts of a layer, if this rule is for their stack; `kind` then cuts
    each of them."""


@dataclass(frozen=True, slots=True)
class Match:
    """A rule, applied to one parameter."""

    names: tuple[str, ...]
    """The names of the Hugging Face tensors that the parameter is made of."""
    kind: Kind
    is_exported: bool
    copies: Sequence[str]
    experts: ExpertLayout | None


@dataclass(slots=True)
class WeightTable:
    """A family's rules for making this model's parameters from the tensors of a Hugging Face checkpoint, and back."""

    rules: Sequence[Rule]
    shapes: Shapes
    _compiled: list[tuple[re.Pattern[str], Rule]] = field(init=False)

    def __post_init__(self) -> None:
        self._compiled = [(_compile(rule.megatron), rule) for rule in self.rules]

    def match(self, name: str) -> Match:
        """Return the Hugging Face names behind a megatron name. Raises KeyError if no rule fits."""
        for pattern, rule in self._compiled:
            found = pattern.fullmatch(name)
            if found:
                names, copies = (
                    tuple(template.format(**found.groupdict()) for template in templates)
                    for templates in (rule.hugging_face, rule.copies)
                )
                return Match(names, rule.kind, rule.is_exported, copies, rule.experts)
        raise KeyError(f"no rule for the parameter {name}")

    def full_shapes(self, match: Match, shard: Shape, num_ranks: int) -> list[Shape]:
        """Return the shapes of the Hugging Face tensors behind a parameter of which each rank holds a `shard`."""
        if match.experts:
            return expert_shapes(match.experts, match.kind, shard, self.shapes, num_ranks)
        return full_shapes(match.kind, shard, self.shapes, num_ranks)

    def common_parts(
        self, match: Match, shard: Held, full: Sequence[torch.Tensor], rank: int, num_ranks: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (view of a rank's `shard`, view of a tensor of `full`) for all rows that both have."""
        if match.experts:
            return expert_parts(match.experts, match.kind, shard, full, self.shapes, rank, num_ranks)
        assert isinstance(shard, torch.Tensor)
        return common_parts(match.kind, shard, full, self.shapes, rank, num_ranks)

    def load(self, model: torch.nn.Module, files: CheckpointFiles) -> list[str]:
        """Fill this rank's parameters from a checkpoint. Return the names of tensors with values that are not
        finite."""
        spoilt: list[str] = []
        for name, held in global_names(model):
            match = self.match(name)
            if not match.names:
                continue
            group = shard_group(is_expert=match.experts is not None)
            full = [files.read(hf_name) for hf_name in match.names]
            _check_shapes(name, match, held, full, self.full_shapes(match, tuple(held.shape), group.size()))
            with torch.no_grad():
                if match.kind == "vocab":
                    assert isinstance(held, torch.Tensor)
                    held.zero_()  # its last rows may be padding
                for part, full_part in self.common_parts(match, held, full, group.rank(), group.size()):
                    part.copy_(full_part)
            params = held.params if isinstance(held, ExpertStack) else [held]
            if not all(bool(param.isfinite().all()) for param in params):
                spoilt += (hf_name for hf_name, tensor in zip(match.names, full) if not tensor.isfinite().all())
        return spoilt


def shard_group(*, is_expert: bool) -> dist.ProcessGroup:
    """Return the ranks of a stage over which a parameter is cut: the tensor-parallel ones, or those that hold its
    experts."""
    if is_expert:
        return parallel_state.get_expert_tensor_and_model_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def check_names(exported: Collection[str], files: CheckpointFiles) -> None:
    """Raise ValueError, on all ranks, unless the model exports exactly the checkpoint's names."""
    for names, what in (
        (set(files.names) - set(exported), "holds tensors that the model of its config.json does not have"),
        (set(exported) - set(files.names), "lacks tensors that the model of its config.json has"),
    ):
        if names:
            raise ValueError(
                f"the checkpoint at {files.model_dir} {what}: {', '.join(sorted(names)[:3])} ({len(names)} in "
                "all); its config.json and weights do not belong together, so choose a complete model folder"
            )


def check_finite(spoilt: Collection[str], files: CheckpointFiles) -> None:
    """Raise ValueError, on all ranks, if any rank found NaN or infinite weights. All ranks of the world must call this
    together."""
    found: list[Collection[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(found, list(spoilt))
    names = sorted({name for part in found for name in part})
    if names:
        raise ValueError(
            f"the checkpoint at {files.model_dir} holds weights that are NaN or infinite: {', '.join(names[:3])} "
            f"({len(names)} tensors in all); choose a folder from before they were spoilt"
        )


def global_names(model: torch.nn.Module, *, of_adapters: bool = False) -> Iterator[tuple[str, Held]]:
    """Yield this rank's parameters, with layers numbered over the whole pipeline; experts of a layer are one stack.
    LoRA's adapters are left out, or with `of_adapters` all others."""
    stacks: dict[str, list[torch.nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if name.endswith(OF_ADAPTERS) != of_adapters:
            continue
        name = global_name(model, name)
        stack, num_found = re.subn(r"(?<=\.experts\.)local_experts\.\d+\.", "", name)
        if num_found:
            stacks.setdefault(stack, []).append(param)
        else:
            yield name, param
    for name, params in stacks.items():
        yield name, ExpertStack(params)


def global_name(model: torch.nn.Module, name: str) -> str:
    """Return the name of a parameter or a module of `model` with its layer numbered over the whole pipeline."""
    layers: torch.nn.ModuleList = model.get_submodule("language_model.decoder.layers")  # type: ignore[assignment]
    offset = int(layers[0].layer_number) - 1 if len(layers) else 0  # type: ignore[arg-type]
    return re.sub(r"(?<=decoder\.layers\.)\d+", lambda found: str(int(found[0]) + offset), name)


def _check_shapes(
    name: str, match: Match, param: Held, full: Sequence[torch.Tensor], wanted: Sequence[tuple[int, ...]]
) -> None:
    for hf_name, tensor, shape in zip(match.names, full, wanted, strict=True):
        if tensor.shape != shape:
            raise ValueError(
                f"{hf_name} of the checkpoint has the shape {tuple(tensor.shape)} where config.json says "
                f"{tuple(shape)} ({name}, {tuple(param.shape)} on each rank); the folder's config and weights do not "
                "belong together"
            )


def _compile(template: str) -> re.Pattern[str]:
    pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{rest\}", r"(?P<rest>.+)")
    return re.compile(pattern)
