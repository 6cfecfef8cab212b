"""Makes a Qwen2.5-VL folder of any size with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 2, 3, 4, 5
PATCH_SIZE = 14
PATCH_VALUES = 3 * 2 * PATCH_SIZE**2


def build_folder(directory: Path, *, text: dict[str, Any], vision: dict[str, Any]) -> Path:
    """Write config, weights and processor settings of a model, and return the folder. `text` and `vision` override the
    defaults of the two configs."""
    config = Qwen2_5_VLConfig(
        text_config={"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False} | text,
        vision_config={"patch_size": PATCH_SIZE, "spatial_merge_size": 2, "temporal_patch_size": 2} | vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(directory)
    settings = {
        "patch_size": PATCH_SIZE,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": 1280 * 28 * 28,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return directory
