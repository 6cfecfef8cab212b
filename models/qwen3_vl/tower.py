"""Qwen3-VL's vision tower: full attention, a learned table of positions, features of inner blocks (deepstack)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from models.sequence.mrope import Grid
from models.vision.tower import VisionTower


def make_visual(hf_config: Qwen3VLConfig, dtype: torch.dtype) -> Any:
    """Return Hugging Face's module, before its weights are loaded."""
    return Qwen3VLVisionModel._from_config(hf_config.vision_config, dtype=dtype)


class Tower(VisionTower):
    """Calls the vision tower. Each embedding is followed by its deepstack features, for the decoder's first layers."""

    @property
    def num_deepstack(self) -> int:
        """The number of blocks whose features go to the decoder."""
        return len(self.config.deepstack_visual_indexes)

    def encode(self, patches_ND: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Return [V, (1 + num_deepstack) * h] values: in each row the embedding, then the deepstack features of one
        block after another."""
        parts = [_grid_layout(grid, self.config.spatial_merge_size, self.visual.num_grid_per_side) for grid in grids]
        positions, indices, weights = (torch.cat(tensors).to(patches_ND.device) for tensors in zip(*parts))
        out = self.visual(
            patches_ND,
            grid_thw=torch.tensor(grids),  # on the CPU, because only boundaries are computed from it
            position_ids=positions,
            interp_indices=indices,
            interp_weights=weights,
        )
        return torch.cat([out.pooler_output, *out.deepstack_features], -1)


@lru_cache(maxsize=4096)
def _grid_layout(grid: Grid, merge_size: int, table_side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (positions [N, 2], rows of the position table [N, 4], their weights [N, 4]) of one image or video."""
    grid_thw = torch.tensor([grid])
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid_thw, num_grid_per_side=table_side, mode="bilinear", align_corners=True, spatial_merge_size=merge_size
    )
    return get_vision_position_ids(grid_thw, merge_size), indices, weights
