"""The critic on one training rank: a second model, which predicts the rewards of responses, token by token.

Before the updates of a step it gives every sampled token the value of the state before it, and the advantage and the
return that follow from the values. Then it learns to predict the returns, with the minibatches of the policy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from models.compat.megatron_core import parallel_state
from yatt_mm.algorithms.gae import explained_variance, gae, moments_of, token_rewards
from yatt_mm.algorithms.losses import value_loss
from yatt_mm.algorithms.settings import AlgorithmSettings
from yatt_mm.protocol.training import MovedMemory
from yatt_mm.training.distributed import device
from yatt_mm.training.megatron_engine import StepResult, TrainEngine
from yatt_mm.training.offload import EVERYTHING
from yatt_mm.training.step_plan import UpdatePlan
from yatt_mm.training.train_sample import SampledTokens, TrainSample


class Critic:
    """One rank's part of the critic. Every method but `hold` is collective, like those of its engine."""

    def __init__(self, engine: TrainEngine, settings: AlgorithmSettings) -> None:
        self.engine = engine
        self._settings = settings

    def hold(self, is_awake: bool) -> MovedMemory:
        """Hold all of the critic's state on the device, or, whenever the rank does not update, nothing."""
        return self.engine.memory.hold(EVERYTHING if is_awake else ())

    def measure(self, plan: UpdatePlan, minibatches: Sequence[Sequence[Sequence[TrainSample]]]) -> dict[str, float]:
        """Give all sampled tokens of a step their old values, returns and whitened advantages, which the plan has as
        scores of responses. Return metrics of all replicas.

        Only ranks of the last pipeline stage have values. On the others nothing changes, and nothing is returned.
        """
        measured: list[tuple[SampledTokens, np.ndarray, np.ndarray]] = []
        for planned, minibatch in zip(plan.minibatches, minibatches, strict=True):
            for of_plan, micro, values in zip(planned.microbatches, minibatch, self.engine.values(minibatch)):
                for one, sample, old_values in zip(of_plan, micro, values, strict=True):
                    assert sample.sampled is not None
                    measured.append((sample.sampled, old_values, self._advantages(one.advantage, old_values)))
        if not parallel_state.is_pipeline_last_stage():
            return {}
        advantages = np.concatenate([np.empty(0), *(advantages for *_, advantages in measured)])
        returns = advantages + np.concatenate([np.empty(0), *(old_values for _, old_values, _ in measured)])
        of_advantages, of_returns = moments_of([advantages, returns], _over_replicas)
        for tokens, old_values, raw in measured:
            tokens.old_values = old_values
            tokens.returns = (raw + old_values).astype(np.float32)
            tokens.advantages = of_advantages.whiten(raw).astype(np.float32)
        explained = explained_variance(of_advantages, of_returns)
        metrics = {"return_mean": of_returns.mean, "value_mean": of_returns.mean - of_advantages.mean}
        return metrics if explained is None else metrics | {"explained_variance": explained}

    def step(self, minibatch: Sequence[Sequence[TrainSample]], total_weight: float) -> StepResult:
        """Do one update toward the returns. `total_weight`: see `Minibatch`."""
        loss = functools.partial(value_loss, settings=self._settings, total_weight=total_weight)
        return self.engine.step(minibatch, loss)

    def _advantages(self, score: float, values: np.ndarray) -> np.ndarray:
        rewards = token_rewards(score, len(values))
        return gae(rewards, values, gamma=self._settings.gamma, lam=self._settings.gae_lambda)


def _over_replicas(values: np.ndarray) -> np.ndarray:
    """Return the sum of the arrays of all data-parallel replicas."""
    total = torch.from_numpy(values).to(device())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.cpu().numpy()
