"""The plan of an export: which rank holds which shard, and which shards are sent together. All ranks of a model agree
on it once.

Sending the tensors is in `models.weights.export`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from models.compat.megatron_core import parallel_state
from models.weights.load import Held, Match, WeightTable, shard_group

BUCKET_BYTES = 64 * 2**20
"""The bytes of each rank's shards that are sent together. Two buckets are in flight at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMeta:
    """A tensor of the export. The fields are those of vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """One parameter that is cut over the ranks of a group, with the facts that all of them know about it."""

    name: str
    """megatron's name, with the global layer number; a stack of experts has one name."""
    owners: tuple[int, ...]
    """[position] the rank that holds the shard, as a number in the model-parallel group."""
    shape: tuple[int, ...]
    """The shape of each shard."""
    dtype: torch.dtype
    match: Match

    @property
    def numel(self) -> int:
        """The number of elements of each shard."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class _Report:
    """One rank's report about its parameters."""

    stage: int
    params: list[tuple[str, tuple[int, ...], torch.dtype]]


def holders() -> dist.ProcessGroup:
    """Return the ranks that together hold exactly one whole model.

    Experts may be divided over more ranks of a stage than the tensor-parallel ones, or over fewer. One of the two
    groups contains the other (`check_layout` checks it).
    """
    model = parallel_state.get_model_parallel_group()
    experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    return experts if experts.size() > model.size() else model


def plan(own: Mapping[str, Held], table: WeightTable) -> list[Shards]:
    """Return every exported parameter, in the same order on all ranks. `own` are this rank's, by their global names.
    All ranks of `holders()` must call this together."""
    group = holders()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    params = [(name, tuple(param.shape), param.dtype) for name, param in own.items() if table.match(name).is_exported]
    held: list[_Report] = [_Report(0, [])] * group.size()
    dist.all_gather_object(held, _Report(stage, params), group=group)
    return [
        shards
        for stage in range(1 + max(item.stage for item in held))
        for shards in _of_stage({rank: item.params for rank, item in enumerate(held) if item.stage == stage}, table)
    ]


def metadata(planned: Sequence[Shards], table: WeightTable) -> list[WeightMeta]:
    """Return names, dtypes and full shapes, in the order of the export."""
    metas: list[WeightMeta] = []
    for shards in planned:
        match = shards.match
        shapes = table.full_shapes(match, shards.shape, len(shards.owners))
        named = [*zip(match.names, shapes, strict=True), *((name, shapes[0]) for name in match.copies)]
        metas += (WeightMeta(name=name, dtype=shards.dtype, shape=shape) for name, shape in named)
    return metas


def buckets(planned: Sequence[Shards]) -> Iterator[list[Shards]]:
    """Yield runs of neighbouring parameters that the same ranks hold in the same dtype, up to BUCKET_BYTES of each
    rank."""
    bucket: list[Shards] = []
    num_bytes = 0
    for shards in planned:
        size = shards.numel * shards.dtype.itemsize
        is_alike = bucket and (bucket[0].owners, bucket[0].dtype) == (shards.owners, shards.dtype)
        if bucket and (not is_alike or num_bytes + size > BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(shards)
        num_bytes += size
    if bucket:
        yield bucket


def _of_stage(
    params_of: dict[int, list[tuple[str, tuple[int, ...], torch.dtype]]], table: WeightTable
) -> Iterator[Shards]:
    """Yield the shards of a stage. Shards of the same name belong together; if several ranks hold the same shard, the
    first of them counts."""
    for at_same_place in zip(*params_of.values(), strict=True):
        name, shape, dtype = at_same_place[0]
        num_owners = shard_group(is_expert=table.match(name).experts is not None).size()
        yield Shards(
            name=name,
            owners=tuple(params_of)[:num_owners],
            shape=shape,
            dtype=dtype,
            match=table.match(name),
        )
