"""A group of one sender and some receivers that lasts for one publish: NCCL on GPUs, gloo on the CPU.

Members meet in a store on the sender's machine, where each takes the next free number, so that nobody needs to know
beforehand who comes. No wait is longer than the deadline, and who did not come is told by who did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from yatt_mm.protocol.published import WeightStream


class StreamError(RuntimeError):
    """Weights did not get from the sender to a receiver."""


class StreamGroup:
    """One member; the sender has number 0."""

    def __init__(self, stream: WeightStream, store: dist.Store, device: torch.device, name: str) -> None:
        """Meet the others. `name`: of this member, empty for the sender. Raises StreamError at the deadline."""
        self._deadline = timedelta(seconds=stream.deadline_s)
        self._others = f"the receivers of {stream.key}" if not name else f"training rank 0 at {stream.host}"
        space = dist.PrefixStore(stream.key, store)
        number = space.add("receivers", 1) if name else 0
        if name:
            space.set(f"name {number}", name)
        if number >= stream.num_members:
            raise StreamError(
                f"{name} came as receiver {number} to {stream.key}, which is for {stream.num_members - 1}: it was "
                "there before, or weights go to more engines than the trainer was told"
            )
        try:
            space.wait([f"name {other}" for other in range(1, stream.num_members)], self._deadline)
            self._group = _make(space, number, stream.num_members, device, self._deadline)
        except RuntimeError as error:
            came = [space.get(f"name {i + 1}").decode() for i in range(space.add("receivers", 0))]
            raise StreamError(
                f"{name or 'training rank 0'} waited {stream.deadline_s:g} s for the {stream.num_members - 1} "
                f"receivers of {stream.key} to meet; these came: {', '.join(came) or 'none'}"
            ) from error

    def broadcast(self, flat: torch.Tensor) -> None:
        """Give `flat` to everybody, or fill it with the sender's. Raises StreamError where one went away or is late."""
        with self._naming_the_others():
            self._group.broadcast(flat, 0, self._deadline).wait(self._deadline)

    def finish(self, device: torch.device) -> None:
        """Wait until everybody is here. Raises StreamError as `broadcast` does."""
        with self._naming_the_others():
            self._group.allreduce([torch.zeros(1, device=device)]).wait(self._deadline)

    def close(self) -> None:
        """Leave; members that still wait for this one are told."""
        self._group.shutdown()

    @contextmanager
    def _naming_the_others(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise StreamError(
                f"{self._others} went away, or kept others waiting for {self._deadline.seconds} s: {error}"
            ) from error


def reach(stream: WeightStream) -> dist.Store:
    """The sender's store. Raises StreamError where it does not answer in time."""
    try:
        return dist.TCPStore(
            stream.host,
            stream.port,
            is_master=False,
            timeout=timedelta(seconds=stream.deadline_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise StreamError(
            f"training rank 0 does not answer at {stream.host}:{stream.port} within {stream.deadline_s:g} s: {error}"
        ) from error


def _make(store: dist.Store, number: int, num_members: int, device: torch.device, deadline: timedelta) -> Any:
    """A process group outside of torch's global one, of which every process here has another."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, number, num_members, deadline)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = deadline
    return dist.ProcessGroupNCCL(store, number, num_members, options)
