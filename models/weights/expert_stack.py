"""The experts of a layer in a checkpoint, and which of their rows a rank holds.

A rank holds whole experts of a layer, stacked [num_local, rows, columns], or a part of each where expert tensor
parallelism cuts them. In the numbering of ranks, the number of the part changes fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from models.weights.slicing import Kind, Shape, Shapes, common_parts, full_shapes

ExpertLayout = Literal["out_in", "in_out", "named"]
"""The form of the experts in a checkpoint. out_in, in_out: one tensor for all experts of a layer, [num_experts, out,
in] as transformers 5 writes it or [num_experts, in, out] as in the released checkpoints; gate and up projection are
joined along `out`. named: separate tensors for every expert."""


class ExpertStack:
    """The parameters of a rank's experts of a layer, one after another, read as one tensor."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        """`params` are the experts' parameters, all of one shape, in the order of the experts."""
        self.params = list(params)

    @property
    def shape(self) -> Shape:
        """The shape [num_local, rows, columns]."""
        return (len(self.params), *self.params[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every expert."""
        return self.params[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of every expert."""
        return self.params[0].device

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.params[expert]

    def detach(self) -> ExpertStack:
        """Return the same memory, outside of autograd."""
        return ExpertStack([param.detach() for param in self.params])


def copy_whole(held: torch.Tensor | ExpertStack, place: torch.Tensor) -> None:
    """Copy a parameter, or a stack of experts, into a tensor of its shape."""
    if isinstance(held, ExpertStack):
        for param, part in zip(held.params, place, strict=True):
            part.copy_(param)
    else:
        place.copy_(held)


def expert_shapes(layout: ExpertLayout, kind: Kind, stack: Shape, shapes: Shapes, num_ranks: int) -> list[Shape]:
    """Return the shapes of the Hugging Face tensors that the ranks' stacks make up together. Each rank holds one of
    shape `stack`."""
    single = full_shapes(kind, stack[1:], shapes, shapes.expert_ranks)
    num_experts = stack[0] * num_ranks // shapes.expert_ranks
    if layout == "named":
        return single * num_experts
    rows, columns = sum(shape[0] for shape in single), single[0][1]
    return [(num_experts, rows, columns) if layout == "out_in" else (num_experts, columns, rows)]


def expert_parts(
    layout: ExpertLayout,
    kind: Kind,
    stack: torch.Tensor | ExpertStack,
    full: Sequence[torch.Tensor],
    shapes: Shapes,
    rank: int,
    num_ranks: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of equal shape, like `common_parts`: a view of a rank's `stack`, and a view of a tensor of `full`."""
    assert num_ranks % shapes.expert_ranks == 0
    group, part = divmod(rank, shapes.expert_ranks)
    num_local = stack.shape[0]
    for number in range(num_local):
        of_expert = _views(layout, kind, full, group * num_local + number)
        yield from common_parts(kind, stack[number], of_expert, shapes, part, shapes.expert_ranks)


def _views(layout: ExpertLayout, kind: Kind, full: Sequence[torch.Tensor], expert: int) -> list[torch.Tensor]:
    """Return the tensors [out, in] of one expert."""
    num_parts = 2 if kind == "gated" else 1
    if layout == "named":
        return list(full[expert * num_parts : (expert + 1) * num_parts])
    joined = full[0][expert] if layout == "out_in" else full[0][expert].t()
    return list(joined.chunk(num_parts))
