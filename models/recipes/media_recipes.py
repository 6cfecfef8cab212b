"""The recipes by which the data plane makes a model's images and videos, by kind of medium. Torch-free.

The recipe of images is in each family's `recipe` module. The families that take videos are in the table here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.recipes.processor_file import resample_filter
from models.registry import load_recipe, read_config

DEFAULT_FPS = 2.0
DEFAULT_MIN_FRAMES = 4
DEFAULT_MAX_FRAMES = 768


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRules:
    """The rules for videos that differ between model families."""

    sampling: Literal["qwen2_vl", "qwen3_vl"]
    """The data plane's rule for sampling frames."""
    bounds: Literal["frame", "video"]
    """The scope of the bounds on pixels: each frame, or all frames together."""
    has_spans_per_frame: bool
    """True if every frame group (each t of the grid) is a span of tokens of its own, with its time as text before
    it."""


VIDEO_RULES: Mapping[str, VideoRules] = {
    "qwen2_5_vl": VideoRules(sampling="qwen2_vl", bounds="frame", has_spans_per_frame=False),
    "qwen3_vl": VideoRules(sampling="qwen3_vl", bounds="video", has_spans_per_frame=True),
    "qwen3_vl_moe": VideoRules(sampling="qwen3_vl", bounds="video", has_spans_per_frame=True),
}
"""From model_type to the rules of its videos. A family that is not here takes no videos."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSampling:
    """The settings of a run for its videos: which frames, and by which decoder. None leaves a value to the model's
    folder."""

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    """The minimum number of pixels of a frame, or of all frames together, by the family's rules."""
    max_pixels: int | None = None
    decoder: Literal["pyav", "decord"] = "pyav"
    """The library with which the data plane decodes videos."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRecipes:
    """The recipes of one model."""

    image: Mapping[str, Any]
    video: Mapping[str, Any] | None = None
    """The recipe of videos; None for a family that takes no videos."""

    def takes(self, kind: str) -> bool:
        """Return True if the model takes this kind of medium."""
        return kind == "image" or self.video is not None

    def by_kind(self) -> dict[str, Mapping[str, Any]]:
        """Return the recipe of each kind of medium that the model takes."""
        return {"image": self.image} | ({"video": self.video} if self.video is not None else {})

    def of(self, kind: str) -> Mapping[str, Any]:
        """Return the recipe for a kind of medium. The model must be able to take this kind."""
        recipe = self.video if kind == "video" else self.image
        assert recipe is not None
        return recipe


def load_recipes(model_dir: Path, sampling: VideoSampling = VideoSampling()) -> MediaRecipes:
    """Return the recipes for a model's folder.

    Raises:
        ValueError: the folder's settings contradict each other, or the settings of the run.
    """
    rules = VIDEO_RULES.get(read_config(model_dir)["model_type"])
    module = load_recipe(model_dir)
    return MediaRecipes(
        image=module.patch_recipe(model_dir),
        video=video_recipe(model_dir, rules, sampling, affine=module.pixel_affine(model_dir)) if rules else None,
    )


def video_recipe(model_dir: Path, rules: VideoRules, sampling: VideoSampling, *, affine: Any) -> dict[str, Any]:
    """Return the recipe that turns a video into uint8 patches. `affine`: the folder's (mean, std) for images."""
    config = _read(model_dir)
    found = (tuple(config.get("image_mean", affine[0])), tuple(config.get("image_std", affine[1])))
    if found != affine:
        raise ValueError(
            f"{model_dir}: its video processor normalises by {found}, its image processor by {affine}; engines and "
            "trainers apply one map to all patches, so make them equal"
        )
    sizes = config.get("size") or {}
    recipe = {
        "kernel": "qwen_vl_video_patches",
        "version": 1,
        "sampling": {
            "by": "fps",
            "rule": rules.sampling,
            "fps": float(_first(sampling.fps, config.get("fps"), DEFAULT_FPS)),
            "min_frames": _first(sampling.min_frames, config.get("min_frames"), DEFAULT_MIN_FRAMES),
            "max_frames": _first(sampling.max_frames, config.get("max_frames"), DEFAULT_MAX_FRAMES),
        },
        "patch_size": config["patch_size"],
        "merge_size": config["merge_size"],
        "temporal_patch_size": config["temporal_patch_size"],
        "bounds": rules.bounds,
        "min_pixels": _first(sampling.min_pixels, config.get("min_pixels"), sizes.get("shortest_edge")),
        "max_pixels": _first(sampling.max_pixels, config.get("max_pixels"), sizes.get("longest_edge")),
        "max_video_tokens": config.get("max_video_tokens") if config.get("cap_pixels_per_frame") else None,
        "resample": resample_filter(config.get("resample", 3)),
        "decoder": sampling.decoder,
    }
    _check_order(recipe["sampling"], "min_frames", "max_frames", model_dir)
    _check_order(recipe, "min_pixels", "max_pixels", model_dir)
    return recipe


def _check_order(values: Mapping[str, Any], low: str, high: str, model_dir: Path) -> None:
    if values[low] > values[high]:
        raise ValueError(
            f"videos would have {low} {values[low]} above {high} {values[high]}; what data.video leaves out comes from "
            f"{model_dir}: set both there"
        )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _read(model_dir: Path) -> dict[str, Any]:
    """Return the video processor's settings. A folder without a video processor uses the image processor's settings for
    both."""
    for name, key in (
        ("video_preprocessor_config.json", None),
        ("processor_config.json", "video_processor"),
        ("preprocessor_config.json", None),
    ):
        path = model_dir / name
        if not path.is_file():
            continue
        config: dict[str, Any] = json.loads(path.read_text())
        if key is None:
            return config
        if key in config:
            nested: dict[str, Any] = config[key]
            return nested
    raise FileNotFoundError(
        f"no processor's settings in {model_dir}; model.path must name a folder saved with its processor"
    )
