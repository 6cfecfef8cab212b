"""Qwen2.5-VL's vision tower: full attention in a few of its blocks, windows in the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from models.sequence.mrope import Grid
from models.vision.tower import VisionTower


def make_visual(hf_config: Qwen2_5_VLConfig, dtype: torch.dtype) -> Any:
    """Return Hugging Face's module, before its weights are loaded."""
    return Qwen2_5_VisionTransformerPretrainedModel._from_config(hf_config.vision_config, dtype=dtype)


class Tower(VisionTower):
    """Calls the vision tower. The window order and positions of a batch are built from one computation per image
    size."""

    def encode(self, patches_ND: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Return [V, h] embeddings of the images' visual tokens."""
        positions, windows, window_bounds = self._layout(grids)
        out = self.visual(
            patches_ND,
            grid_thw=torch.tensor(grids),  # on the CPU, because only boundaries are computed from it
            position_ids=positions.to(patches_ND.device),
            window_index=windows.to(patches_ND.device),
            cu_window_seqlens=window_bounds,
        )
        embeddings: torch.Tensor = out.pooler_output
        return embeddings

    def _layout(self, grids: Sequence[Grid]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the positions, window order and window boundaries of all images."""
        config = self.config
        parts = [_grid_layout(grid, config.spatial_merge_size, config.window_size, config.patch_size) for grid in grids]
        begins = accumulate((len(windows) for _, windows, _ in parts[:-1]), initial=0)
        windows = torch.cat([windows + begin for (_, windows, _), begin in zip(parts, begins)])
        lengths = torch.cat([lengths for _, _, lengths in parts])
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return torch.cat([positions for positions, _, _ in parts]), windows, bounds


@lru_cache(maxsize=4096)
def _grid_layout(
    grid: Grid, merge_size: int, window_size: int, patch_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (positions [N, 2], window order [V], window lengths in patches) of one image, by transformers' rules."""
    grid_thw = torch.tensor([grid])
    positions = get_vision_position_ids(grid_thw, merge_size)
    windows, bounds = get_vision_window_index(grid_thw, merge_size, window_size, patch_size)
    return positions, windows, bounds.diff()
