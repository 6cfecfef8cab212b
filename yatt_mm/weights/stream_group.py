"""A process group of one sender and its receivers, for one publish: NCCL on GPUs, gloo on the CPU.

The members meet in a file on their host. Each receiver takes the next free number there, so no list of
receivers is needed in advance. No wait is longer than the weight stream's deadline; the error then names the receivers
that came.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from yatt_mm.protocol.published import WeightStream


class StreamError(RuntimeError):
    """The weights did not reach a receiver."""


class StreamGroup:
    """One member's part in the process group of a weight stream; the sender has number 0."""

    def __init__(self, stream: WeightStream, store: dist.Store, device: torch.device, name: str) -> None:
        """Join the process group. `name`: what errors call this member; empty for the sender.

        Waits for: all other members. Unblocked by: the last member, or the weight stream's deadline.

        Raises StreamError if a member did not come before the deadline, or if there are too many.
        """
        self._deadline = timedelta(seconds=stream.deadline_s)
        self._others = f"the receivers of {stream.key}" if not name else "training rank 0"
        space = dist.PrefixStore(stream.key, store)
        number = space.add("receivers", 1) if name else 0
        if name:
            space.set(f"name {number}", name)
        if number >= stream.num_members:
            raise StreamError(
                f"{name} came as receiver {number} to {stream.key}, which is for {stream.num_members - 1}: it "
                "has joined before, or there are more engines than the trainer was configured for"
            )
        try:
            space.wait([f"name {other}" for other in range(1, stream.num_members)], self._deadline)
        except RuntimeError as error:
            came = [space.get(f"name {i + 1}").decode() for i in range(space.add("receivers", 0))]
            raise StreamError(
                f"{name or 'training rank 0'} waited {stream.deadline_s:g} s for the {stream.num_members - 1} "
                f"receivers of {stream.key} to meet; these came: {', '.join(came) or 'none'}"
            ) from error
        with self._naming_the_others():
            self._group = _make(space, number, stream.num_members, device, self._deadline)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send `flat` to all receivers, or fill it with what the sender sent.

        Raises StreamError if a member has gone or is late.
        """
        with self._naming_the_others():
            self._group.broadcast(flat, 0, self._deadline).wait(self._deadline)

    def finish(self, device: torch.device) -> None:
        """Wait until all members have called `finish`. Raises StreamError if a member has gone or is late."""
        with self._naming_the_others():
            self._group.allreduce([torch.zeros(1, device=device)]).wait(self._deadline)

    def close(self) -> None:
        """Leave the group; members that still wait for this member get an error."""
        self._group.shutdown()

    @contextmanager
    def _naming_the_others(self) -> Iterator[None]:
        """Turn an error of torch into a StreamError that names the other members."""
        try:
            yield
        except RuntimeError as error:
            raise StreamError(
                f"{self._others} went away, or kept others waiting for {self._deadline.seconds} s: {error}"
            ) from error


def open_store(stream: WeightStream) -> dist.Store:
    """Open the store in which the members meet. Raises StreamError if its file is gone."""
    if not Path(stream.store).exists():
        raise StreamError(f"{stream.store}, in which {stream.key} meets, is gone: training rank 0 has ended")
    store = dist.FileStore(stream.store)
    store.set_timeout(timedelta(seconds=stream.deadline_s))
    return store


def _make(store: dist.Store, number: int, num_members: int, device: torch.device, deadline: timedelta) -> Any:
    """Return a process group outside torch's default group, because ranks and engines have different default groups."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, number, num_members, deadline)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = deadline
    return dist.ProcessGroupNCCL(store, number, num_members, options)
