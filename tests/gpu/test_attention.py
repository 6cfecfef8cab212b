"""Attention in half precision: one kernel over packed sequences, against float32 over the same numbers."""

from __future__ import annotations

import pytest
import torch

from models.decoder.core_attention import prefix_attention
from models.layout.context_parallel import TokenRange
from models.sequence.attention import Segments, packed_attention

TOLERANCE = 1e-2
"""||out - wanted|| / ||wanted||, where operands and results are bfloat16."""
LENGTHS = (7, 130, 1, 64, 300)


def states(num_tokens: int, num_heads: int, head_size: int) -> torch.Tensor:
    """Return [T, H, D] random bfloat16 numbers that take a gradient."""
    return torch.randn(num_tokens, num_heads, head_size, device="cuda", dtype=torch.bfloat16).requires_grad_()


def distance(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    assert found is not None and wanted is not None
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def check(found: torch.Tensor, wanted: torch.Tensor, halves: list[torch.Tensor], floats: list[torch.Tensor]) -> None:
    """Compare results and the gradients of a random direction."""
    direction = torch.randn_like(wanted)
    found.backward(direction.to(found.dtype))
    wanted.backward(direction)
    assert distance(found, wanted) < TOLERANCE
    for half, whole in zip(halves, floats, strict=True):
        assert distance(half.grad, whole.grad) < TOLERANCE


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 32), (2, 2, 24), (16, 16, 80), (28, 4, 128)])
def test_packed_attention_in_half_precision(heads: int, groups: int, size: int, causal: bool) -> None:
    torch.manual_seed(0)
    bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    halves = [states(bounds[-1], count, size) for count in (heads, groups, groups)]
    floats = [tensor.detach().float().requires_grad_() for tensor in halves]
    segments = Segments(bounds, torch.device("cuda"))
    found = packed_attention(*halves, segments, scale=size**-0.5, causal=causal)
    wanted = packed_attention(*floats, segments, scale=size**-0.5, causal=causal)
    check(found, wanted, halves, floats)


def test_queries_are_the_last_of_their_keys() -> None:
    torch.manual_seed(0)
    ranges = [TokenRange(first=0, begin=40, end=100), TokenRange(first=100, begin=100, end=150)]
    halves = [states(count, heads, 64) for count, heads in ((110, 8), (150, 2), (150, 2))]
    floats = [tensor.detach().float().requires_grad_() for tensor in halves]
    found = prefix_attention(*halves, ranges, scale=0.125)
    wanted = prefix_attention(*floats, ranges, scale=0.125)
    check(found, wanted, halves, floats)
