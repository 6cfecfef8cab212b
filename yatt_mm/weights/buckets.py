"""Buckets: how the tensors of a model are grouped for a broadcast, and how an engine receives them.

The sending side is in `stream_publisher`. This module imports little, because the engines' processes import it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch

from yatt_mm.protocol.published import WeightStream
from yatt_mm.weights.segment import Row, view_of
from yatt_mm.weights.stream_group import StreamGroup, open_store

BUCKET_BYTES = 64 * 2**20
"""The size of a bucket in bytes, whose tensors are broadcast together; a larger tensor gets a separate bucket."""


def receive(stream: WeightStream, device: torch.device, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive a weight stream: yield (name, tensor) in new memory on `device`.

    `name`: what errors call this receiver.

    Waits for: the sender and all other receivers.  Unblocked by: their data, their end, or the stream's deadline.

    Raises StreamError if the sender or another receiver is late or has gone.
    """
    group = StreamGroup(stream, open_store(stream), device, name)
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
    """Yield the buckets: neighbouring tensors of up to BUCKET_BYTES. The same index always gives the same buckets."""
    bucket: list[Row] = []
    for row in map(Row._make, json.loads(index)):
        if bucket and row.offset + row.num_bytes - bucket[0].offset > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(row)
    if bucket:
        yield bucket


def new_flat(bucket: Sequence[Row], device: torch.device) -> torch.Tensor:
    """Return [bytes] uint8: empty memory for a bucket."""
    return torch.empty(bucket[-1].offset + bucket[-1].num_bytes - bucket[0].offset, dtype=torch.uint8, device=device)
