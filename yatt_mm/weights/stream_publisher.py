"""Publishing to engines that share no memory with the training ranks: the tensors are broadcast, bucket by bucket.

Every publish has a group of its own (`group`), so an engine that was started anew just takes part in the next one.
The ranks are free as soon as the stream is announced; `release` waits until every engine has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from models.weights.export import ShardedWeights
from yatt_mm.protocol.published import WeightStream
from yatt_mm.weights.buckets import buckets, new_flat
from yatt_mm.weights.checked_copy import check_finite
from yatt_mm.weights.rank_agreement import together
from yatt_mm.weights.segment import Layout, view_of
from yatt_mm.weights.stream_group import StreamGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """Who takes the weights."""

    host: str
    """This machine's address, as they reach it."""
    num: int
    """Processes that hold an engine's model, or a part of it."""
    deadline_s: float
    """Of every wait for them."""


class StreamPublisher:
    """One training rank's part of publishing; `publish` is collective over all ranks."""

    def __init__(self, weights: ShardedWeights, device: torch.device, receivers: Receivers) -> None:
        self._weights = weights
        self._device = device
        self._receivers = receivers
        self._index = Layout.of(weights.metadata()).index
        self._store: dist.TCPStore | None = None
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._sending: Future[None] | None = None
        self._num_published = 0

    def publish(self, version: int) -> WeightStream | None:
        """Begin to send; on the first rank what engines need to receive it.

        Raises on every rank, before anything is sent, where one has a weight that is not finite.
        """
        self.release()
        together(self._check)
        self._num_published += 1
        stream = self._announce(version) if dist.get_rank() == 0 else None
        self._sending = self._sender.submit(self._send, stream)
        return stream

    def release(self) -> None:
        """Wait for what is being sent. Raises StreamError where an engine did not take it in time."""
        if self._sending:
            sending, self._sending = self._sending, None
            sending.result()

    def _check(self) -> None:
        for name, tensor in self._weights.held():
            check_finite(name, tensor)

    def _announce(self, version: int) -> WeightStream:
        if self._store is None:
            timeout = timedelta(seconds=self._receivers.deadline_s)
            self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        return WeightStream(
            host=self._receivers.host,
            port=self._store.port,
            key=f"version {version} (publish {self._num_published})",
            num_members=1 + self._receivers.num,
            deadline_s=self._receivers.deadline_s,
            index=self._index,
        )

    def _send(self, stream: WeightStream | None) -> None:
        """Collective: all ranks iterate to the end, whatever becomes of the stream."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        tensors = iter(self._weights)
        try:
            if stream:
                assert self._store is not None
                _send_all(stream, self._store, tensors, self._device)
        finally:
            for _ in tensors:
                """The other ranks need this one."""


def _send_all(
    stream: WeightStream, store: dist.Store, tensors: Iterator[tuple[str, torch.Tensor]], device: torch.device
) -> None:
    group = StreamGroup(stream, store, device, name="")
    try:
        for bucket in buckets(stream.index):
            flat = new_flat(bucket, device)
            for row in bucket:
                name, tensor = next(tensors)
                assert name == row.name
                view_of(row, flat, bucket[0].offset).copy_(tensor)
            group.broadcast(flat)
        group.finish(device)
    finally:
        group.close()
