"""The vision tower: Hugging Face's module, replicated. Each tensor- and context-parallel rank of the first stage
encodes a part of the images.

A family says how its module is called (`models.<family>.tower`); everything else is here.

The tower takes uint8 patches and normalises them on the device. Each rank encodes its share of the images. An
all-gather gives every rank all embeddings, and its backward pass keeps each rank's own rows. So a rank's parameter
gradients cover its images only: they must be summed over the group. The data-parallel reduction sums over
context-parallel ranks, `yatt_mm.training.optimizer` over tensor-parallel ones.

N patches, D values of a patch (C channels x T frames x P x P), V visual tokens, h decoder's hidden size. Some families
have n square tiles [n, C, S, S] instead of patches; `t` of an image's grid is then its number of tiles.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface, PreTrainedModel

from models.layout.gather import gather_rows
from models.sequence.attention import vision_attention
from models.sequence.distinct_media import deal_media
from models.sequence.mrope import Grid

ATTENTION = "yatt_packed_flash"
"""The name of our attention function. transformers passes the boundaries of packed images only to names with `flash` in
them."""

AttentionInterface.register(ATTENTION, vision_attention)


class VisionTower(torch.nn.Module):
    """Turns uint8 patches of images into embeddings of their visual tokens. A family's tower gives `encode`."""

    attention: ClassVar[str] = ATTENTION
    """The name of the attention function in the module's blocks, as transformers knows it."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        visual: Any,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        group: dist.ProcessGroup,
        sum_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`visual` is the Hugging Face tower. `group` has the ranks that share the work. `sum_group` has those of them
        whose tokens differ (context parallelism), so that each has a part of an embedding's gradient."""
        super().__init__()
        self.visual: Any = visual
        self.config: Any = visual.config
        self.config._attn_implementation = self.attention
        self.group = group
        self.sum_group = sum_group
        self.always_runs = False
        """True if a rank without an image of its own encodes a blank one times zero, so that every microbatch gives
        every parameter a gradient. megatron needs this if it reduces gradients during the backward pass."""
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32)[:, None], persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32)[:, None], persistent=False)

    @property
    def num_deepstack(self) -> int:
        """The number of additional embeddings behind each embedding, for the decoder's first layers."""
        return 0

    @property
    def merge_size(self) -> int:
        """The number of patches per visual token along each side."""
        return int(self.config.spatial_merge_size)

    @property
    def output_size(self) -> int:
        """The hidden size h of the decoder."""
        return int(self.config.out_hidden_size)

    def blank(self) -> tuple[torch.Tensor, Grid]:
        """Return the smallest image, normalised, and its grid."""
        side, config = self.merge_size, self.config
        size = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return torch.zeros(side * side, size), (1, side, side)

    def forward(self, images: Sequence[np.ndarray | None], grids: Sequence[Grid]) -> torch.Tensor:
        """Return [V, (1 + num_deepstack) * h] embeddings of all images in order, on every rank of the group.

        A rank must be given the images of its own share (`models.sequence.distinct_media.own_media`); raises ValueError
        otherwise.
        """
        merged = [t * h * w // self.merge_size**2 for t, h, w in grids]
        shares = deal_media(grids, self.group.size())
        mine = shares[self.group.rank()]
        local = self._encode([_given(images[i], grids[i]) for i in mine], [grids[i] for i in mine])
        if self.group.size() == 1 or not grids:
            return local
        sizes = [sum(merged[i] for i in share) for share in shares]
        gathered = gather_rows(local, sizes, self.group, self.sum_group)
        return gathered[_natural_order(shares, merged).to(local.device)]

    def recompute(self) -> None:
        """Keep only the inputs of the tower's blocks for the backward pass, which computes them again."""
        for module in self.visual.modules():
            if isinstance(module, PreTrainedModel):
                module.gradient_checkpointing_enable({"use_reentrant": False})

    def normalise(self, patches: torch.Tensor) -> torch.Tensor:
        """Return the normalised pixels, float32 of the same shape as uint8 [N, D] or [n, C, S, S]: ((x / 255) - mean) /
        std per channel, as in the image processor."""
        by_channel = patches.view(patches.shape[0], self.mean.shape[0], -1).float()
        return by_channel.div_(255).sub_(self.mean).div_(self.std).view(patches.shape)

    @abstractmethod
    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Return [V, (1 + num_deepstack) * h] embeddings of images whose normalised patches (or tiles) are
        concatenated."""

    def _encode(self, images: list[np.ndarray], grids: list[Grid]) -> torch.Tensor:
        weight = next(self.visual.parameters())
        if not images:
            return self._encode_none(weight)
        patches = torch.from_numpy(np.concatenate(images)).to(weight.device)
        return self.encode(self.normalise(patches).to(weight.dtype), grids)

    def _encode_none(self, weight: torch.Tensor) -> torch.Tensor:
        """Return an empty [0, (1 + num_deepstack) * h] tensor that takes part in the backward pass, because all ranks
        must enter its collectives."""
        is_trained = torch.is_grad_enabled() and any(param.requires_grad for param in self.visual.parameters())
        if is_trained and self.always_runs:
            pixels, grid = self.blank()
            blank = self.encode(pixels.to(weight), [grid])
            return blank[:0] + 0 * blank.sum()
        empty = weight.new_zeros(0, (1 + self.num_deepstack) * self.output_size)
        return empty.requires_grad_(is_trained)


def _given(patches: np.ndarray | None, grid: Grid) -> np.ndarray:
    if patches is None:
        raise ValueError(
            f"the patches of an image of {grid} patches are missing on the rank that encodes it; give each rank at "
            "least the media that TrainEngine.own_media names"
        )
    return patches


def _natural_order(shares: list[list[int]], sizes: list[int]) -> torch.Tensor:
    """Return the places of the rows of image 0, 1, ... when the shares are concatenated."""
    dealt = [image for share in shares for image in share]
    begins = dict(zip(dealt, accumulate((sizes[image] for image in dealt), initial=0)))
    return torch.cat([torch.arange(begins[image], begins[image] + size) for image, size in enumerate(sizes)])
