"""Publishing by broadcast, bucket by bucket, to engines that share no memory with the training ranks.

Every publish has a process group of its own (`stream_group`), so an engine that was restarted simply joins the next
one. `publish` returns as soon as the weight stream is announced, and a thread sends; `release` waits until every engine
has the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from models.weights.export import ShardedWeights
from yatt_mm.protocol.published import WeightStream
from yatt_mm.weights.buckets import buckets, new_flat
from yatt_mm.weights.checked_copy import check_finite
from yatt_mm.weights.rank_agreement import fail_together
from yatt_mm.weights.segment import SegmentLayout, view_of
from yatt_mm.weights.stream_group import StreamGroup, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """The engines' processes that receive the weights."""

    num: int
    """The number of processes that hold an engine's model, or a part of it."""
    deadline_s: float
    """The timeout of every wait for the receivers, in seconds."""


class StreamPublisher:
    """One training rank's part of publishing by broadcast; `publish` is collective over all ranks."""

    def __init__(self, weights: ShardedWeights, device: torch.device, path: str, receivers: Receivers) -> None:
        """`path`: the beginning of the names of files in which the members meet, in a folder that only this user can
        enter."""
        self._weights = weights
        self._device = device
        self._receivers = receivers
        self._index = SegmentLayout.of(weights.metadata()).index
        self._path = path
        self._meeting: Path | None = None
        """The file in which the members of the last publish met."""
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._sending: Future[None] | None = None
        self._num_published = 0

    def publish(self, version: int) -> WeightStream | None:
        """Start to send the present weights. Returns what engines need to receive them on rank 0, None on other ranks.

        If one rank has a weight that is not finite, all ranks raise before anything is sent: NonFiniteWeightsError on
        that rank, PublishError on others. Raises StreamError if an engine did not take the previous publish in time.
        """
        self.release()
        fail_together(self._check)
        self._num_published += 1
        stream = self._announce(version) if dist.get_rank() == 0 else None
        self._sending = self._sender.submit(self._send, stream)
        return stream

    def release(self) -> None:
        """Wait until every engine has received what is being sent.

        Raises StreamError if one did not receive it in time.
        """
        if self._sending:
            sending, self._sending = self._sending, None
            sending.result()

    def _check(self) -> None:
        """Check that the weights that this rank holds are finite."""
        for name, tensor in self._weights.held():
            check_finite(name, tensor)

    def _announce(self, version: int) -> WeightStream:
        """Make the file in which the members meet, and return the description of the new weight stream."""
        if self._meeting is not None:
            self._meeting.unlink(missing_ok=True)
        self._meeting = Path(f"{self._path}.stream_{self._num_published}")
        self._meeting.touch(mode=0o600)
        return WeightStream(
            store=str(self._meeting),
            key=f"version {version} (publish {self._num_published})",
            num_members=1 + self._receivers.num,
            deadline_s=self._receivers.deadline_s,
            index=self._index,
        )

    def _send(self, stream: WeightStream | None) -> None:
        """Gather the tensors, and send them on rank 0.

        Collective: all ranks iterate to the end, even if the stream fails.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        tensors = iter(self._weights)
        try:
            if stream:
                _send_all(stream, tensors, self._device)
        finally:
            for _ in tensors:
                """Only iterate: the other ranks need this rank to gather."""


def _send_all(stream: WeightStream, tensors: Iterator[tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Send all tensors to the stream's receivers, and wait until all have them."""
    group = StreamGroup(stream, open_store(stream), device, name="")
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
