"""Failing together: if one training rank cannot do its part of publishing, all ranks raise.

All functions are collective over the default process group of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class PublishError(RuntimeError):
    """Another training rank could not publish; the message names it and its error."""


def fail_together(act: Callable[[], T]) -> T:
    """Call `act` on every rank and return its result. Collective.

    If it fails on one rank, all ranks raise: its own error on that rank, PublishError on the others.
    """
    error: Exception | None = None
    try:
        result = act()
    except Exception as found:
        error = found
    failed = [(rank, message) for rank, message in enumerate(gather(str(error) if error else None)) if message]
    if error:
        raise error
    if failed:
        rank, message = failed[0]
        raise PublishError(f"training rank {rank} could not publish: {message}")
    return result


def gather(value: T) -> list[T]:
    """Return [rank] the values of all ranks. Collective."""
    found: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
