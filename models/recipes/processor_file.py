"""Reads a folder's image processor settings. No torch, because rollout and the controllers' start use it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESAMPLE = {2: "bilinear", 3: "bicubic"}
"""The names of Pillow's resampling filters, by the number that Hugging Face writes."""

Channels = tuple[float, float, float]


def read_processor(model_dir: Path) -> dict[str, Any]:
    """Return the image processor's settings. Newer transformers nest them in processor_config.json."""
    for name, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        path = Path(model_dir) / name
        if path.is_file():
            config: dict[str, Any] = json.loads(path.read_text())
            return config if key is None else config[key]
    raise FileNotFoundError(
        f"neither preprocessor_config.json nor processor_config.json in {model_dir}; "
        "model.path must name a folder saved with its processor"
    )


def pixel_affine(model_dir: Path) -> tuple[Channels, Channels]:
    """Return (mean, std) per channel: the model's input is (x / 255 - mean) / std."""
    config = read_processor(model_dir)
    mean, std = (tuple(float(value) for value in config[key]) for key in ("image_mean", "image_std"))
    if len(mean) != 3 or len(std) != 3:
        raise ValueError(f"{model_dir}: image_mean and image_std have {len(mean)} and {len(std)} values; wanted 3")
    return mean, std  # type: ignore[return-value]


def resample_filter(number: int) -> str:
    """Return the data plane's name of a resampling filter. Raises ValueError for a filter that no recipe uses."""
    if number not in RESAMPLE:
        raise ValueError(f"preprocessor resample is {number}; supported are {RESAMPLE}: change the processor's config")
    return RESAMPLE[number]
