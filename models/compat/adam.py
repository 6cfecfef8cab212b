"""AdamW with one step count per parameter group, like FusedAdam of Transformer Engine and Apex.

If neither of them is installed, megatron-core 0.16.1 uses torch.optim.AdamW, but its checkpoint code only fits the
state of FusedAdam. With torch's state, loading fails, or all parameters share one `step` tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class GroupStepAdam(torch.optim.Optimizer):
    """Adam, with decoupled weight decay if `adam_w_mode`. Each parameter has the state exp_avg and exp_avg_sq."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        self._update = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, once. `closure` is not supported."""
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        step = torch.tensor(float(group["step"]), device=params[0].device)
        self._update(
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def install() -> None:
    """Make megatron-core use this optimizer instead of torch's. Call it after importing megatron-core."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = GroupStepAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = GroupStepAdam
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
