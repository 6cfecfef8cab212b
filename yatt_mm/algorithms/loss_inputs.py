"""What the losses read of the sampled tokens, besides the model's outputs.

Axes: K = sampled tokens of a microbatch, all sequences one after another, each of them whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a loss needs of the sampled tokens besides the model's outputs."""

    weights: torch.Tensor
    """[K] float32, with the sum `total_weight` over the global batch."""
    advantages: torch.Tensor
    """[K] float32."""
    old_logprobs: torch.Tensor
    """[K] float32 log-probabilities under the policy with which ratios compare: the weights at the start of the step,
    or, without a correction, the older ones that sampled the token. Only those count where `is_current` is False."""
    is_current: torch.Tensor
    """[K] bool, True where that policy is the current one."""
    rollout_logprobs: torch.Tensor
    """[K] float32 log-probabilities that the engine computed when it sampled."""
    reference_logprobs: torch.Tensor | None = None
    """[K] float32 log-probabilities under the reference; None where nothing reads them."""
    old_values: torch.Tensor | None = None
    """[K] float32 values under the critic at the start of the step; None without a critic."""
    returns: torch.Tensor | None = None
    """[K] float32, what the critic learns to predict; None without one."""
    sequences: torch.Tensor
    """[K] int64, the place of each token's response in the microbatch."""
    num_sequences: int
    """The number of responses in the microbatch."""

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """Return [K] the mean of the [K] `values` over each token's response."""
        return self.sequence_sums(values) / self.sequence_sums(values.new_ones(len(values)))

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return [K] the sum of the [K] `values` over each token's response."""
        zeros = values.new_zeros(self.num_sequences)
        return zeros.index_put((self.sequences,), values, accumulate=True)[self.sequences]  # in order also on GPUs

    def sequence_maxima(self, values: torch.Tensor) -> torch.Tensor:
        """Return [K] the largest of the [K] `values`, which are not negative, over each token's response."""
        zeros = values.new_zeros(self.num_sequences)
        return zeros.scatter_reduce(0, self.sequences, values, reduce="amax")[self.sequences]
