"""Failing together: what one rank cannot do, no rank believes done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class PublishError(RuntimeError):
    """Another rank could not publish."""


def together(act: Callable[[], T]) -> T:
    """Act on every rank; where one fails, all raise: its own error there, PublishError elsewhere. Collective."""
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
    """[rank] everyone's value. Collective."""
    found: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
