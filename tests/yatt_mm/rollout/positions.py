"""The positions of a prompt's tokens: as the trainer computes them, and as transformers' model does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from models.registry import load_family
from models.sequence.packing import pack
from tests.models.positions import behind_videos
from yatt_mm.training.train_sample import TrainSample

GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")


def of_trainer(model_dir: Path, sample: TrainSample) -> np.ndarray:
    """Return [3, T] positions."""
    layout = load_family(model_dir).token_layout(_model(model_dir).config)
    packed = pack([sample], layout, multiple_of=1, device=torch.device("cpu"))
    found: np.ndarray = packed.position_ids[:, 0].numpy()
    return found


def of_transformers(model_dir: Path, processed: Any) -> np.ndarray:
    """Return [3, T] positions, from what the processor made of a prompt; behind a video as in `behind_videos`."""
    inputs = {name: torch.as_tensor(np.asarray(processed[name])) for name in GRIDS if name in processed}
    tokens, config = torch.as_tensor(processed["input_ids"]), _model(model_dir).config
    kinds = (tokens == config.image_token_id).int() + 2 * (tokens == config.video_token_id).int()
    positions, _ = _model(model_dir).model.get_rope_index(tokens, mm_token_type_ids=kinds, **inputs)
    found: np.ndarray = behind_videos(positions[:, 0], kinds[0]).numpy()
    return found


@cache
def _model(model_dir: Path) -> Any:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(model_dir))
