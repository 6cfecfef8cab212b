"""Exports the policy's full tensors under their Hugging Face names, from any layout, any number of times.

`ShardedWeights` is a weight source in vLLM's sense (`vllm.distributed.weight_transfer.base.WeightSource`): `metadata()`
describes the tensors, and iterating gives them. If all ranks share the target memory, no collective is needed:
`own_parts` tells each rank which values to copy to which place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from models.weights.expert_stack import ExpertStack, copy_whole
from models.weights.export_plan import Shards, WeightMeta, buckets, holders, metadata, plan
from models.weights.load import Held, WeightTable, global_names


class ShardedWeights:
    """The model's weights as Hugging Face tensors, gathered from the ranks. Each iteration reads the present
    parameters. The ranks agree once, at the beginning, on which of them sends what."""

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        table: WeightTable,
        *,
        of_adapters: bool = False,
        merged: Callable[[Held], Held] = lambda held: held.detach(),
    ) -> None:
        """`chunks` are this rank's parts of the model. All ranks of `export_plan.holders()` must call this together.

        `of_adapters`: the tensors are LoRA's matrices alone. `merged` gives the value of a parameter that is exported,
        in which an adapter may be merged.
        """
        self._chunks = chunks
        self._table = table
        self._merged = merged
        self._parameters = {
            name: held for chunk in chunks for name, held in global_names(chunk, of_adapters=of_adapters)
        }
        self._planned = plan(self._parameters, table)
        self._metadata = metadata(self._planned, table)
        self._group = holders()

    def metadata(self) -> list[WeightMeta]:
        """Return name, dtype and full shape of every tensor, in the order of iteration."""
        return list(self._metadata)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor on every rank. All ranks must iterate to the end.

        While one bucket's tensors are yielded, the next bucket is being sent. If one rank holds the whole model,
        tensors may be views of its parameters; otherwise the caller owns them.
        """
        if self._group.size() == 1:
            for shards in self._planned:
                yield from self._join(shards, [self._own(shards.name)])
            return
        bundles = list(buckets(self._planned))
        buffers = _Buffers(bundles, next(next(iter(self._chunks)).parameters()).device)
        under_way: list[_Transfer] = []
        for bucket in bundles:
            # if the consumer changes streams, as vLLM's does, the last reads of the buffer were on another stream
            buffers.wait_until_read()
            under_way.append(_start(bucket, buffers.next(bucket), self._own, self._group))
            if len(under_way) > 1:
                yield from self._finish(under_way.pop(0))
                buffers.note_read()
        for transfer in under_way:
            yield from self._finish(transfer)

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for all tensors that this rank holds. The name is that of a Hugging Face tensor that
        contains it."""
        for shards in self._planned:
            if self._group.rank() in shards.owners:
                held = self._own(shards.name)
                parts = held.params if isinstance(held, ExpertStack) else [held]
                yield from ((shards.match.names[0], part) for part in parts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that together hold exactly one whole model, this one among them, by their numbers in the world."""
        return tuple(dist.get_process_group_ranks(self._group))

    def own_parts(
        self, full: Mapping[str, torch.Tensor], number: int, num_replicas: int
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield (name, part of a parameter of this rank, its place in `full`). When all ranks of `num_replicas` whole
        models have copied their parts, `full` is the model. `number`: which of these models this rank belongs to.

        If several ranks hold the same part, one of them is chosen, a different one from part to part. No collective is
        called.
        """
        rank = self._group.rank()
        mine = [shards for shards in self._planned if rank in shards.owners]
        for shards in mine[number::num_replicas]:
            match, position = shards.match, shards.owners.index(rank)
            if match.kind == "rep" and position:
                continue
            param = self._own(shards.name)
            for names in (match.names, *((copy,) for copy in match.copies)):
                tensors = [full[name] for name in names]
                parts = self._table.common_parts(match, param, tensors, position, len(shards.owners))
                yield from ((names[0], source, place) for source, place in parts)

    def _own(self, name: str) -> Held:
        """Return the present value of a parameter of this rank."""
        return self._merged(self._parameters[name])

    def _finish(self, transfer: _Transfer) -> Iterator[tuple[str, torch.Tensor]]:
        for work in transfer.works:
            work.wait()
        sizes = [shards.numel for shards in transfer.bucket]
        by_position = [part.split(sizes) for part in transfer.gathered]
        for shards, *parts in zip(transfer.bucket, *by_position, strict=True):
            for name, tensor in self._join(shards, [part.view(shards.shape) for part in parts]):
                is_of_buffer = tensor.untyped_storage().data_ptr() == transfer.gathered.untyped_storage().data_ptr()
                yield name, tensor.clone() if is_of_buffer else tensor

    def _join(self, shards: Shards, parts: Sequence[Held]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the Hugging Face tensors of a parameter from all of its shards. A whole parameter is given without a
        copy."""
        match, table, num_parts = shards.match, self._table, len(parts)
        if match.kind == "rep" or (num_parts == 1 and match.kind in ("col", "row") and not match.experts):
            assert isinstance(parts[0], torch.Tensor)
            tensors = [parts[0]]
        else:
            wanted = table.full_shapes(match, shards.shape, num_parts)
            tensors = [torch.empty(shape, dtype=shards.dtype, device=parts[0].device) for shape in wanted]
            for position, part in enumerate(parts):
                for source, place in table.common_parts(match, part, tensors, position, num_parts):
                    place.copy_(source)
        yield from zip(match.names, tensors, strict=True)
        yield from ((copy, tensors[0]) for copy in match.copies)


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A bucket that is being sent to all ranks."""

    bucket: list[Shards]
    gathered: torch.Tensor
    """[number of owners of a parameter, elements of a shard] of the bucket, filled by the all-gather."""
    works: list[dist.Work]


class _Buffers:
    """Two flat buffers, used alternately by the buckets of an export."""

    def __init__(self, bundles: Sequence[Sequence[Shards]], device: torch.device) -> None:
        num_bytes = max(len(bucket[0].owners) * _shard_bytes(bucket) for bucket in bundles)
        self._flat = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._was_read = torch.cuda.Event() if device.type == "cuda" else None

    def next(self, bucket: Sequence[Shards]) -> torch.Tensor:
        """Return the next buffer, as [number of owners of a parameter, elements of a shard] in the bucket's dtype."""
        self._flat.reverse()
        num_positions = len(bucket[0].owners)
        return self._flat[0][: num_positions * _shard_bytes(bucket)].view(bucket[0].dtype).view(num_positions, -1)

    def note_read(self) -> None:
        """Record an event after all work that was sent to the device so far. Some of this work reads the buffer that is
        used next, so that buffer is written only after the event."""
        if self._was_read:
            self._was_read.record()

    def wait_until_read(self) -> None:
        """Let the current stream wait until the recorded reads are finished."""
        if self._was_read:
            self._was_read.wait()


def _start(
    bucket: list[Shards], gathered: torch.Tensor, own: Callable[[str], Held], group: dist.ProcessGroup
) -> _Transfer:
    """Copy this rank's shards to their places and begin to send them, without waiting."""
    owners = bucket[0].owners
    if group.rank() in owners:
        position = owners.index(group.rank())
        flat = gathered[position]
        for shards, place in zip(bucket, flat.split([shards.numel for shards in bucket]), strict=True):
            copy_whole(own(shards.name), place.view(shards.shape))
    if len(owners) == group.size():
        mine = gathered[owners.index(group.rank())]
        work = dist.all_gather_into_tensor(gathered.view(-1), mine, group=group, async_op=True)
        return _Transfer(bucket, gathered, [work])
    works = [
        dist.broadcast(part, dist.get_global_rank(group, owner), group=group, async_op=True)
        for part, owner in zip(gathered, owners, strict=True)
    ]
    return _Transfer(bucket, gathered, works)


def _shard_bytes(bucket: Sequence[Shards]) -> int:
    return sum(shards.numel for shards in bucket) * bucket[0].dtype.itemsize
