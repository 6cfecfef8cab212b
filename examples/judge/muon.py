"""Muon in float32: `torch.optim.Muon` computes in bfloat16, which takes twenty times as long on processors that have no
instructions for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalised momentum of matrices (Jordan, 2024), each as large as one of AdamW in the root of
    the mean square, with Nesterov's momentum and without weight decay."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step. `closure` is not used."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state: dict[str, Any] = self.state[matrix]
                if not state:
                    state["mean"] = torch.zeros_like(matrix)
                mean = state["mean"]
                mean.lerp_(matrix.grad, 1 - MOMENTUM)
                size = 0.2 * math.sqrt(max(matrix.shape))
                matrix.add_(orthogonalised(matrix.grad.lerp(mean, MOMENTUM)), alpha=-group["lr"] * size)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose singular values are all near 1, with the singular vectors of this one."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.T if is_tall else found
