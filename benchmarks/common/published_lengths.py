"""Prompts with an image and several responses, drawn from published distributions.

What is taken from where:
- sides of images: laion2B-en, by the announcement of LAION-5B (Schuhmann et al. 2022, laion.ai/blog/laion-5b): of
  2.32e9 images 1.324e9 have both sides above 256 pixels, 0.488e9 above 512, 0.076e9 above 1024. A lognormal shorter
  side through the first two points (median 290, sigma 0.70) gives 0.085e9 for the third.
- aspect: COCO's card in SotA-CV (2018): the ratio of height to width of nine images in ten is between 0.6 and 1.5; a
  lognormal with these as its 5th and 95th percentiles.
- lengths of responses: exponential, as ServeGen finds of production workloads (Xiang et al., NSDI 2026), with the mean
  of ShareGPT, 337.99 tokens; text of a prompt 161.31 tokens on average (Kwon et al., SOSP 2023, figure 11).
Ours: that prompts' text is exponential too, that image size, text and response do not depend on each other, and that
the responses of a group are drawn alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from yatt_mm.training.train_sample import SampledTokens, TrainSample

SHARE_ABOVE = {256: 1324 / 2320, 512: 488 / 2320}
"""The share of images whose shorter side is longer than this number of pixels."""
ASPECT_90 = (0.6, 1.5)
MEAN_PROMPT, MEAN_RESPONSE = 161.31, 337.99
MIN_PIXELS, MAX_PIXELS = 56 * 56, 1280 * 28 * 28
"""The bounds in pixels that Qwen's model cards suggest for the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The sizes of one prompt and of its responses."""

    grid: tuple[int, int, int]
    """The grid of the group's image, in patches."""
    num_text: int
    """The number of prompt tokens, without those of the image."""
    lengths: tuple[int, ...]
    """The number of tokens of each of the G responses."""

    @property
    def num_prompt(self) -> int:
        """The number of prompt tokens with the image expanded: one visual token for every four patches of the image."""
        return self.num_text + math.prod(self.grid) // 4


def draw(num_prompts: int, group_size: int, *, shrink: float, seed: int, patch_size: int = 14) -> list[Prompt]:
    """Return prompts with one image each. All token counts, also that of the image, are divided by `shrink`."""
    random = np.random.default_rng(seed)
    return [
        Prompt(
            grid=_grid(random, shrink, patch_size),
            num_text=_length(random, MEAN_PROMPT / shrink),
            lengths=tuple(_length(random, MEAN_RESPONSE / shrink) for _ in range(group_size)),
        )
        for _ in range(num_prompts)
    ]


def to_samples(prompt: Prompt, *, image_token: int, vocab_size: int, patch_values: int) -> list[TrainSample]:
    """Return the group's rows with random content. They share one array of patches."""
    random = np.random.default_rng(prompt.num_prompt)
    patches = random.integers(0, 256, (math.prod(prompt.grid), patch_values), dtype=np.uint8)
    image = np.full(math.prod(prompt.grid) // 4, image_token, dtype=np.int64)
    text = random.integers(image_token + 4, vocab_size, prompt.num_text)
    return [
        TrainSample(
            token_ids=np.concatenate([image, text, random.integers(image_token + 4, vocab_size, length)]),
            loss_mask=np.arange(prompt.num_prompt + length) >= prompt.num_prompt,
            grid_thw=(prompt.grid,),
            patches=(patches,),
            sampled=only_weights(np.full(length, 1e-3, dtype=np.float32)),
        )
        for length in prompt.lengths
    ]


def only_weights(weights: np.ndarray) -> SampledTokens:
    """Return tokens for a loss that uses nothing but their weights, [K] float32."""
    zeros = np.zeros_like(weights)
    return SampledTokens(
        weights=weights, advantages=zeros, rollout_logprobs=zeros, is_stale=np.zeros(len(weights), dtype=bool)
    )


def _length(random: np.random.Generator, mean: float) -> int:
    return 1 + int(random.exponential(mean))


def _grid(random: np.random.Generator, shrink: float, patch_size: int) -> tuple[int, int, int]:
    """Return an image's grid in patches, within the processor's bounds, with sides that are multiples of two
    patches."""
    (low, low_share), (high, high_share) = SHARE_ABOVE.items()
    low_z, high_z = (NormalDist().inv_cdf(1 - share) for share in (low_share, high_share))
    sigma = math.log(high / low) / (high_z - low_z)
    shorter = low * math.exp(sigma * (random.standard_normal() - low_z))
    bounds = [math.log(ratio) for ratio in ASPECT_90]
    spread = (bounds[1] - bounds[0]) / 2 / NormalDist().inv_cdf(0.95)
    aspect = math.exp(sum(bounds) / 2 + spread * random.standard_normal())
    height, width = (shorter * aspect, shorter) if aspect > 1 else (shorter, shorter / aspect)
    pixels = height * width
    zoom = math.sqrt(min(max(pixels, MIN_PIXELS), MAX_PIXELS) / pixels / shrink) / (2 * patch_size)
    return (1, 2 * max(1, round(height * zoom)), 2 * max(1, round(width * zoom)))
