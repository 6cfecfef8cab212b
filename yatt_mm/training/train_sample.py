"""One training sample in the form that the training engine takes: numpy at the border, and pixels only where they are
needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, kw_only=True)
class SampledTokens:
    """What the loss needs of the K sampled tokens of one response, in host memory: arrays of K values."""

    weights: np.ndarray
    """[K] float32. See `yatt_mm.algorithms.token_weights`."""
    advantages: np.ndarray
    """[K] float32."""
    rollout_logprobs: np.ndarray
    """[K] float32 log-probabilities that the engine computed when it sampled."""
    is_stale: np.ndarray
    """[K] bool, True on tokens that are older than the weights at the start of the step."""
    is_corrected: bool = False
    """True if the loss corrects for the difference between the engine's policy and that at the start of the step. Then
    ratios compare with the latter for all tokens, also for stale ones."""
    reference_logprobs: np.ndarray | None = None
    """[K] float32 log-probabilities under the reference, if the loss reads them and they were measured."""
    old_values: np.ndarray | None = None
    """[K] float32 values of the states before the tokens, under the critic at the start of the step; None without a
    critic, which `Critic.measure` gives with the returns and the advantages."""
    returns: np.ndarray | None = None
    """[K] float32, what the critic learns to predict."""
    old_logprobs: np.ndarray = field(init=False)
    """[K] float32 log-probabilities under the policy with which ratios compare: the one that sampled the token, or with
    a correction, the one at the start of the step. Only those count where `is_current` is False."""
    is_current: np.ndarray = field(init=False)
    """[K] bool, True where the weights in training are still that policy."""

    def __post_init__(self) -> None:
        self.old_logprobs, self.is_current = self.rollout_logprobs, ~self._is_engines

    def measure(self, logprobs: np.ndarray) -> None:
        """Take the log-probabilities under the weights at the start of the step, [K] float32, before the first update
        changes the weights. Without a correction, those of stale tokens stay the engine's, because only the engine had
        their policy."""
        self.old_logprobs = np.where(self._is_engines, self.rollout_logprobs, logprobs)
        self.is_current = np.zeros_like(self.is_stale)

    @property
    def _is_engines(self) -> np.ndarray:
        """[K] bool, True where ratios compare with the engine's log-probabilities."""
        return np.zeros_like(self.is_stale) if self.is_corrected else self.is_stale


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """A prompt with one response. T tokens, K of them sampled."""

    token_ids: np.ndarray
    """[T] int64, prompt with its image tokens expanded, then the response."""
    loss_mask: np.ndarray
    """[T] bool, True on tokens the policy sampled; prompt, image and tool tokens are False."""
    grid_thw: tuple[tuple[int, int, int], ...]
    """(t, h, w) in patches, one per image or video, in the order of the tokens."""
    seconds_per_grid: tuple[float, ...] = ()
    """The seconds from one t of a video to the next, one per medium (any number for images); () means one for all."""
    patches: Sequence[np.ndarray | None]
    """uint8 [t * h * w, D] per image, None for those that other ranks encode (`TrainEngine.own_media`); empty on ranks
    that need no pixels."""
    sampled: SampledTokens | None = None
    """The sampled tokens; None where only log-probabilities are wanted."""
    media_keys: tuple[str, ...] = ()
    """The name of each image, its digest: a microbatch encodes images with the same name once. Without names, images
    are equal only if they are the same array object."""
