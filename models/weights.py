"""Weights between a Hugging Face checkpoint and megatron's parameters, by one table of rules in both directions.

A family gives the table (`models.<family>.mapping`); this file knows how each kind of tensor is cut over the
tensor-parallel ranks, reads what a rank needs, and puts full tensors together again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
import torch.distributed as dist

from models.checkpoint_files import CheckpointFiles
from models.megatron import parallel_state

Kind = Literal["rep", "col", "row", "vocab", "qkv", "gated"]
"""rep: whole on every rank. col, row: cut along dim 0, 1. vocab: rows padded, cut along dim 0. qkv: query, key
and value interleaved by key/value group, cut along dim 0. gated: each half cut along dim 0, then joined."""

BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a family's table."""

    megatron: str
    """Name with global layer number; may hold {layer} and {rest}."""
    hugging_face: Sequence[str]
    kind: Kind
    is_exported: bool = True
    copies: Sequence[str] = ()
    """Further names under which the checkpoint keeps the same single tensor: written, not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What cutting depends on besides the tensor."""

    num_heads: int
    num_groups: int
    """Key/value heads."""
    vocab_size: int
    padded_vocab_size: int


@dataclass(frozen=True, slots=True)
class _Match:
    names: list[str]
    kind: Kind
    is_exported: bool
    copies: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A parameter as every rank knows it."""

    stage: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class WeightTable:
    """A family's rules, ready to use for one model."""

    rules: Sequence[Rule]
    shapes: Shapes
    _compiled: list[tuple[re.Pattern[str], Rule]] = field(init=False)

    def __post_init__(self) -> None:
        self._compiled = [(_compile(rule.megatron), rule) for rule in self.rules]

    def match(self, name: str) -> _Match:
        """The Hugging Face names behind a megatron name. Raises KeyError where no rule fits."""
        for pattern, rule in self._compiled:
            found = pattern.fullmatch(name)
            if found:
                names = [template.format(**found.groupdict()) for template in rule.hugging_face]
                return _Match(names, rule.kind, rule.is_exported, rule.copies)
        raise KeyError(f"no rule for the parameter {name}")

    def check_names(self, model: torch.nn.Module, files: CheckpointFiles) -> None:
        """Raise ValueError, on all ranks alike, unless `export` gives exactly the checkpoint's tensors. Collective."""
        matches = [self.match(item.name) for item in _place(dict(global_names(model)))]
        exported = {name for match in matches if match.is_exported for name in (*match.names, *match.copies)}
        for names, what in (
            (set(files.names) - exported, "holds tensors that the model of its config.json does not have"),
            (exported - set(files.names), "lacks tensors that the model of its config.json has"),
        ):
            if names:
                raise ValueError(
                    f"the checkpoint at {files.model_dir} {what}: {', '.join(sorted(names)[:3])} ({len(names)} in "
                    "all); its config.json and weights do not belong together, so choose a complete model folder"
                )

    def load(self, model: torch.nn.Module, files: CheckpointFiles) -> None:
        """Fill this rank's parameters from a checkpoint."""
        group = parallel_state.get_tensor_model_parallel_group()
        for name, param in global_names(model):
            match = self.match(name)
            full = [files.read(hf_name) for hf_name in match.names]
            shard = cut(match.kind, full, self.shapes, group.rank(), group.size())
            if shard.shape != param.shape:
                raise ValueError(
                    f"{', '.join(match.names)} of the checkpoint give a tensor of shape {tuple(shard.shape)} where "
                    f"config.json says {tuple(param.shape)} ({name}); the folder's config and weights do not belong "
                    "together"
                )
            with torch.no_grad():
                param.copy_(shard)

    def export(self, model: torch.nn.Module) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Full tensors under their Hugging Face names, in buckets. Collective: every rank iterates to the end."""
        own = dict(global_names(model))
        placed = _place(own)
        for bucket in _buckets(placed):
            yield self._export_bucket(bucket, own)

    def _export_bucket(
        self, bucket: list[_Placed], own: dict[str, torch.nn.Parameter]
    ) -> list[tuple[str, torch.Tensor]]:
        """One broadcast along the pipeline, one all-gather over tensor parallelism, then views and joins."""
        device = next(iter(own.values())).device
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        flat = torch.empty(sum(_numel(item) for item in bucket), dtype=bucket[0].dtype, device=device)
        if pipeline.rank() == bucket[0].stage:
            torch.cat([own[item.name].detach().reshape(-1) for item in bucket], out=flat)
        if pipeline.size() > 1:
            dist.broadcast(flat, dist.get_global_rank(pipeline, bucket[0].stage), group=pipeline)
        group = parallel_state.get_tensor_model_parallel_group()
        gathered = flat.new_empty(group.size() * flat.numel())
        dist.all_gather_into_tensor(gathered, flat, group=group)
        sizes = [_numel(item) for item in bucket]
        by_rank = [part.split(sizes) for part in gathered.view(group.size(), -1)]
        exported: list[tuple[str, torch.Tensor]] = []
        for item, *shards in zip(bucket, *by_rank):
            match = self.match(item.name)
            if match.is_exported:
                shaped = [shard.view(item.shape) for shard in shards]
                tensors = join(match.kind, shaped, self.shapes)
                exported += zip(match.names, tensors)
                exported += ((copy, tensors[0]) for copy in match.copies)
        return exported


def global_names(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters, their layers numbered over the whole pipeline."""
    layers: torch.nn.ModuleList = model.get_submodule("language_model.decoder.layers")  # type: ignore[assignment]
    offset = int(layers[0].layer_number) - 1 if len(layers) else 0  # type: ignore[arg-type]
    for name, param in model.named_parameters():
        yield re.sub(r"(?<=decoder\.layers\.)\d+", lambda found: str(int(found[0]) + offset), name), param


def cut(kind: Kind, full: Sequence[torch.Tensor], shapes: Shapes, rank: int, num_ranks: int) -> torch.Tensor:
    """One rank's parameter from the Hugging Face tensors of a rule."""
    if kind == "rep":
        return full[0]
    if kind == "row":
        return full[0].chunk(num_ranks, 1)[rank]
    if kind == "gated":
        return torch.cat([half.chunk(num_ranks)[rank] for half in full])
    whole = full[0]
    if kind == "vocab":
        padding = whole.new_zeros(shapes.padded_vocab_size - whole.shape[0], *whole.shape[1:])
        whole = torch.cat([whole, padding])
    if kind == "qkv":
        by_group = [part.view(shapes.num_groups, -1, *part.shape[1:]) for part in full]
        whole = torch.cat(by_group, 1).reshape(-1, *whole.shape[1:])
    return whole.chunk(num_ranks)[rank]


def join(kind: Kind, shards: Sequence[torch.Tensor], shapes: Shapes) -> list[torch.Tensor]:
    """The Hugging Face tensors of a rule from all ranks' parameters: the inverse of `cut`."""
    if kind == "rep":
        return [shards[0]]
    if kind == "row":
        return [torch.cat(list(shards), 1)]
    if kind == "gated":
        return [torch.cat(halves) for halves in zip(*(shard.chunk(2) for shard in shards))]
    whole = torch.cat(list(shards))
    if kind == "vocab":
        return [whole[: shapes.vocab_size]]
    if kind == "qkv":
        heads_per_group = shapes.num_heads // shapes.num_groups
        by_head = whole.view(shapes.num_groups, heads_per_group + 2, -1, *whole.shape[1:])
        parts = by_head.split([heads_per_group, 1, 1], 1)
        return [part.reshape(-1, *whole.shape[1:]) for part in parts]
    return [whole]


def _compile(template: str) -> re.Pattern[str]:
    pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{rest\}", r"(?P<rest>.+)")
    return re.compile(pattern)


def _place(own: dict[str, torch.nn.Parameter]) -> list[_Placed]:
    """Every parameter of the pipeline, in the same order on all ranks."""
    group = parallel_state.get_pipeline_model_parallel_group()
    mine = [_Placed(group.rank(), name, tuple(param.shape), param.dtype) for name, param in own.items()]
    stages: list[list[_Placed]] = [[] for _ in range(group.size())]
    dist.all_gather_object(stages, mine, group=group)
    return [item for stage in stages for item in stage]


def _buckets(placed: list[_Placed]) -> Iterator[list[_Placed]]:
    """Neighbours of one stage and dtype, up to BUCKET_BYTES on each rank."""
    for _, same in groupby(placed, key=lambda item: (item.stage, item.dtype)):
        bucket: list[_Placed] = []
        num_bytes = 0
        for item in same:
            size = _numel(item) * item.dtype.itemsize
            if bucket and num_bytes + size > BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(item)
            num_bytes += size
        yield bucket


def _numel(item: _Placed) -> int:
    return torch.Size(item.shape).numel()
