"""The vision tower: Hugging Face's module, replicated, its images dealt to the ranks of a tensor-parallel group.

A family says how its module is called (`models.<family>.tower`); everything else is here.

Takes uint8 patches and normalises them on the device. Each rank encodes its share of the images; an all-gather
gives every rank all embeddings, and its backward keeps each rank's own rows. So a rank's parameter gradients
cover its images only: they must be summed over the group (`yatt_mm.training.engine` does).

N patches, D values of a patch (C channels x T frames x P x P), V visual tokens, h decoder's hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface

from models.attention import vision_attention
from models.mrope import Grid

ATTENTION = "yatt_packed_flash"
"""transformers passes the boundaries of packed images only to implementations with `flash` in their name."""

AttentionInterface.register(ATTENTION, vision_attention)


class VisionTower(torch.nn.Module):
    """uint8 patches of images -> their visual tokens' embeddings. A family's tower gives `encode`."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, visual: Any, *, mean: Sequence[float], std: Sequence[float], group: dist.ProcessGroup) -> None:
        """`visual`: the Hugging Face tower. `group`: the ranks that share the work; all are given all images."""
        super().__init__()
        self.visual: Any = visual
        self.config: Any = visual.config
        self.config._attn_implementation = ATTENTION
        self.group = group
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32)[:, None], persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32)[:, None], persistent=False)

    @property
    def num_deepstack(self) -> int:
        """Further embeddings behind each one, for as many of the decoder's first layers."""
        return 0

    def forward(self, images: Sequence[np.ndarray], grids: Sequence[Grid]) -> torch.Tensor:
        """[V, (1 + num_deepstack) * h] embeddings of all images in order, on every rank of the group."""
        merged = [t * h * w // self.config.spatial_merge_size**2 for t, h, w in grids]
        shares = deal_images([t * h * w for t, h, w in grids], self.group.size())
        mine = shares[self.group.rank()]
        local = self._encode([images[i] for i in mine], [grids[i] for i in mine])
        if self.group.size() == 1:
            return local
        sizes = [sum(merged[i] for i in share) for share in shares]
        gathered = _GatherRows.apply(local, sizes, self.group)  # type: ignore[no-untyped-call]
        return gathered[_natural_order(shares, merged).to(local.device)]

    def normalise(self, patches_ND: torch.Tensor) -> torch.Tensor:
        """[N, D] float32 from uint8: ((x / 255) - mean) / std per channel, what the image processor gives."""
        by_channel = patches_ND.view(patches_ND.shape[0], self.mean.shape[0], -1).float()
        return by_channel.div_(255).sub_(self.mean).div_(self.std).view(patches_ND.shape)

    @abstractmethod
    def encode(self, patches_ND: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """[V, (1 + num_deepstack) * h] embeddings of images whose normalised patches follow each other."""

    def _encode(self, images: list[np.ndarray], grids: list[Grid]) -> torch.Tensor:
        weight = self.visual.patch_embed.proj.weight
        if not images:
            empty = weight.new_zeros(0, (1 + self.num_deepstack) * self.config.out_hidden_size)
            # a backward pass has collectives behind this one, which all ranks of the group must enter
            is_trained = any(param.requires_grad for param in self.visual.parameters())
            return empty.requires_grad_(is_trained and torch.is_grad_enabled())
        patches = torch.from_numpy(np.concatenate(images)).to(weight.device)
        return self.encode(self.normalise(patches).to(weight.dtype), grids)


def deal_images(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Image numbers per rank, ascending: the costliest first, each to the rank with the least so far."""
    load = [0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for image in sorted(range(len(costs)), key=lambda image: -costs[image]):
        rank = min(range(num_ranks), key=load.__getitem__)
        shares[rank].append(image)
        load[rank] += costs[image]
    return [sorted(share) for share in shares]


def _natural_order(shares: list[list[int]], sizes: list[int]) -> torch.Tensor:
    """Where the rows of image 0, 1, ... stand when the shares follow each other."""
    dealt = [image for share in shares for image in share]
    begins = dict(zip(dealt, accumulate((sizes[image] for image in dealt), initial=0)))
    return torch.cat([torch.arange(begins[image], begins[image] + size) for image, size in enumerate(sizes)])


class _GatherRows(torch.autograd.Function):
    """All-gather of uneven blocks of rows. The gradient must be the same on all ranks; each keeps its rows."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, local: torch.Tensor, sizes: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.begin, ctx.size = sum(sizes[: group.rank()]), sizes[group.rank()]
        padded = local.new_zeros(max(sizes), local.shape[1])
        padded[: local.shape[0]] = local
        blocks = local.new_empty(len(sizes) * max(sizes), local.shape[1])
        dist.all_gather_into_tensor(blocks, padded, group=group)
        return torch.cat([block[:size] for block, size in zip(blocks.split(max(sizes)), sizes)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grad[ctx.begin : ctx.begin + ctx.size], None, None
