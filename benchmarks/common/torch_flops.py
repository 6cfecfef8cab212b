"""Counts the operations of a running model with torch's counter, including attention on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, mm_flop, sdpa_backward_flop_count, sdpa_flop_count


def flop_counter() -> FlopCounterMode:
    """Return torch's counter, extended by formulas for what it leaves out: fused attention on the CPU, products in
    place."""
    aten: Any = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten.addmm_: _product,
            aten._scaled_dot_product_flash_attention_for_cpu: _forward,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
        },
    )


def count(run: Callable[[], object]) -> int:
    """Return the number of operations of `run()`, and of its backward pass if it has one."""
    with flop_counter() as counter:
        run()
    return int(counter.get_total_flops())


def _product(total: Any, left: Any, right: Any, *unused: Any, **unused_too: Any) -> int:
    return int(mm_flop(left, right))


def _forward(query: Any, key: Any, value: Any, *unused: Any, **unused_too: Any) -> int:
    return int(sdpa_flop_count(query, _with_heads_of(query, key), _with_heads_of(query, value)))


def _backward(grad: Any, query: Any, key: Any, value: Any, *unused: Any, **unused_too: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, _with_heads_of(query, key), _with_heads_of(query, value)))


def _with_heads_of(query: Any, key: Any) -> tuple[int, ...]:
    """Return the shape that grouped keys or values have in the product."""
    return (*key[:-3], query[-3], *key[-2:])
