"""An all-gather of uneven blocks of rows with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def gather_rows(
    local: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, sum_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return [sum(sizes), ...] the rows of all ranks of `group`, one rank after another. `sizes`: rows of each rank.

    The gradient must be the same on all ranks of `group`, and each rank keeps that of its own rows. If each rank of
    `sum_group` has only a part of the gradient, it is summed over that group first. Then all ranks must take part in
    the backward pass, also those without rows (give them rows that require a gradient).
    """
    gathered: torch.Tensor = _GatherRows.apply(local, list(sizes), group, sum_group)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        local: torch.Tensor,
        sizes: list[int],
        group: dist.ProcessGroup,
        sum_group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.begin, ctx.size, ctx.sum_group = sum(sizes[: group.rank()]), sizes[group.rank()], sum_group
        most = max(sizes)
        padded = local.new_zeros(most, *local.shape[1:])
        padded[: local.shape[0]] = local
        blocks = local.new_empty(len(sizes) * most, *local.shape[1:])
        dist.all_gather_into_tensor(blocks, padded, group=group)
        return torch.cat([block[:size] for block, size in zip(blocks.split(most or 1), sizes)]) if most else local

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if ctx.sum_group is not None and ctx.sum_group.size() > 1:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=ctx.sum_group)
        return grad[ctx.begin : ctx.begin + ctx.size], None, None, None
