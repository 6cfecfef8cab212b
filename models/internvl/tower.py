"""InternVL's vision tower: full attention inside each tile, a class token that is dropped, and a projector that joins
squares of patches.

No tile attends to another, so tiles form a batch and nothing is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from transformers import InternVLConfig, InternVLVisionModel
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from models.internvl.config import merge_size
from models.sequence.mrope import Grid
from models.vision.tower import VisionTower


class Visual(torch.nn.Module):
    """The vision tower and the projector of Hugging Face's model, as one module with the names of the checkpoints."""

    def __init__(self, hf_config: InternVLConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.vision_tower: Any = InternVLVisionModel._from_config(hf_config.vision_config, dtype=dtype)
        self.multi_modal_projector: Any = InternVLMultiModalProjector(hf_config).to(dtype)
        self.config: Any = self.vision_tower.config
        self.merge_size = merge_size(hf_config)


def make_visual(hf_config: InternVLConfig, dtype: torch.dtype) -> Any:
    """Return tower and projector, before their weights are loaded."""
    return Visual(hf_config, dtype)


class Tower(VisionTower):
    """Turns uint8 tiles [n, C, S, S] into embeddings, in the order of the tiles, and row by row in each tile."""

    attention: ClassVar[str] = "sdpa"

    @property
    def merge_size(self) -> int:
        """The number of patches per visual token along each side."""
        return int(self.visual.merge_size)

    @property
    def output_size(self) -> int:
        """The hidden size of the decoder."""
        return int(self.visual.multi_modal_projector.linear_2.out_features)

    def blank(self) -> tuple[torch.Tensor, Grid]:
        """Return one tile of zeros."""
        height, width = self.config.image_size
        grid = (1, height // self.config.patch_size[0], width // self.config.patch_size[1])
        return torch.zeros(1, self.config.num_channels, height, width), grid

    def encode(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Return [V, h] embeddings of all tiles. `pixels` are the tiles [n, C, S, S]."""
        features = self.visual.vision_tower(pixel_values=pixels).last_hidden_state[:, 1:]
        merge, (_, rows, columns) = self.merge_size, grids[0]
        squares = features.unflatten(1, (rows // merge, merge, columns // merge, merge)).transpose(2, 3)
        embeddings: torch.Tensor = self.visual.multi_modal_projector(squares.flatten(3).flatten(1, 2))
        return embeddings.flatten(0, 1)
