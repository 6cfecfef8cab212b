"""A model as a stream of buckets: how it is cut, and receiving it. Light: engines' processes import it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch

from yatt_mm.protocol.published import WeightStream
from yatt_mm.weights.segment import Row, view_of
from yatt_mm.weights.stream_group import StreamGroup, reach

BUCKET_BYTES = 64 * 2**20
"""Tensors that are broadcast together; a larger tensor has a bucket of its own."""


def receive(stream: WeightStream, device: torch.device, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a stream, in memory of its own. `name`: of the receiver, for whom others wait.

    Raises StreamError where the sender, or another receiver, is late or went away.
    """
    group = StreamGroup(stream, reach(stream), device, name)
    try:
        for bucket in buckets(stream.index):
            flat = new_flat(bucket, device)
            group.broadcast(flat)
            for row in bucket:
                yield row.name, view_of(row, flat, bucket[0].offset)
        group.finish(device)
    finally:
        group.close()


def buckets(index: bytes) -> Iterator[list[Row]]:
    """Neighbours, up to BUCKET_BYTES: the same for everyone who has the index."""
    bucket: list[Row] = []
    for row in map(Row._make, json.loads(index)):
        if bucket and row.offset + row.num_bytes - bucket[0].offset > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(row)
    if bucket:
        yield bucket


def new_flat(bucket: Sequence[Row], device: torch.device) -> torch.Tensor:
    """[bytes] room for a bucket."""
    return torch.empty(bucket[-1].offset + bucket[-1].num_bytes - bucket[0].offset, dtype=torch.uint8, device=device)
