"""Tests how far each kernel is from transformers' own processors on the same pixels, as numbers.

Processors with Pillow are matched bit for bit if they exist (see test_kernel). The default processors use torchvision,
whose resize rounds differently: the bounds below are the measured differences, rounded up.
"""

import logging
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import models  # noqa: F401  transformers' Qwen2-VL code imports torchvision, which needs this on a CPU
from dataplane.media.recipes import parse_recipe
from dataplane.media.videos import Video
from tests.dataplane.clips import encode_video, h264, moving
from tests.dataplane.media.test_kernel import run_kernel
from tests.dataplane.shards import RECIPE, noise

pytestmark = pytest.mark.torch

VIDEO_RECIPE = {
    "kernel": "qwen_vl_video_patches",
    "version": 1,
    "sampling": {"by": "fps", "rule": "qwen2_vl", "fps": 2.0, "min_frames": 4, "max_frames": 768},
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "bounds": "frame",
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 768,
    "resample": "bicubic",
}


def run_video_kernel(video: Video, recipe: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    plan = parse_recipe(recipe).plan(video)
    out = np.empty(math.prod(plan.shape), np.uint8)
    plan.write(out)
    return out.reshape(plan.shape), dict(plan.meta)


def run_image_processor(image: Image.Image) -> np.ndarray:
    """Run transformers' default processor of Qwen2-VL and Qwen2.5-VL images."""
    pytest.importorskip("torch")
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    keys = ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor = Qwen2VLImageProcessor(do_rescale=False, do_normalize=False, **{key: RECIPE[key] for key in keys})
        return processor(image, return_tensors="pt")["pixel_values"].numpy()


def run_video_processor(frames: np.ndarray, recipe: dict[str, Any]) -> tuple[np.ndarray, list[int]]:
    """Run transformers' default processor of Qwen2.5-VL or Qwen3-VL videos on the sampled frames."""
    pytest.importorskip("torch")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    kind: Any = Qwen2VLVideoProcessor if recipe["bounds"] == "frame" else Qwen3VLVideoProcessor
    logging.getLogger("transformers").setLevel(logging.ERROR)
    processor = kind(
        do_rescale=False,
        do_normalize=False,
        do_sample_frames=False,
        patch_size=recipe["patch_size"],
        merge_size=recipe["merge_size"],
        temporal_patch_size=recipe["temporal_patch_size"],
        size={"shortest_edge": recipe["min_pixels"], "longest_edge": recipe["max_pixels"]},
        cap_pixels_per_frame=recipe.get("max_video_tokens") is not None,
        **({"max_video_tokens": recipe["max_video_tokens"]} if recipe.get("max_video_tokens") else {}),
    )
    found = processor([frames.transpose(0, 3, 1, 2)], return_tensors="pt")
    return found["pixel_values_videos"].numpy(), found["video_grid_thw"][0].tolist()


def compare(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, float]:
    """Return the largest difference, and the share of values that differ."""
    assert ours.shape == theirs.shape
    distance = np.abs(ours.astype(int) - theirs.astype(int))
    return int(distance.max()), float((distance > 0).mean())


@pytest.mark.parametrize(
    ("size", "most_levels", "most_frac"), [((224, 224), 0, 0.0), ((480, 640), 2, 0.01), ((97, 180), 2, 0.01)]
)
def test_images_by_the_default_processor_differ_only_where_they_are_resized(
    size: tuple[int, int], most_levels: int, most_frac: float
) -> None:
    for image in (Image.fromarray(noise(7, *size)), Image.fromarray(moving(1, *size)[0])):
        ours, _ = run_kernel(image, RECIPE)
        levels, frac = compare(ours, run_image_processor(image))
        assert levels <= most_levels and frac <= most_frac, (levels, frac)


@pytest.mark.parametrize("bounds", ["frame", "video"])
@pytest.mark.parametrize("cap", [None, 16, 128_000])
def test_videos_by_the_default_processor_have_its_grid_and_nearly_its_values(
    tmp_path: Path, bounds: str, cap: int | None
) -> None:
    video = Video(encode_video(tmp_path / "a.webm", "VP90", moving(31, 120, 180)))
    rule = {"frame": "qwen2_vl", "video": "qwen3_vl"}[bounds]
    sampling = {"by": "fps", "rule": rule, "fps": 4.5, "min_frames": 4, "max_frames": 768}
    recipe = {**VIDEO_RECIPE, "sampling": sampling, "bounds": bounds, "max_video_tokens": cap}
    if bounds == "video":
        recipe |= {"patch_size": 16, "min_pixels": 4 * 32 * 32, "max_pixels": 300 * 300}
    ours, meta = run_video_kernel(video, recipe)
    theirs, grid = run_video_processor(np.stack(list(video.frames(meta["frame_indices"]))), recipe)
    assert meta["grid_thw"] == grid
    levels, frac = compare(ours, theirs)
    assert levels <= 2 and frac <= 0.01, (levels, frac)


@pytest.mark.parametrize("num_frames", [1, 3, 4])
def test_where_nothing_is_resized_the_patches_of_a_video_are_equal(tmp_path: Path, num_frames: int) -> None:
    video = Video(encode_video(tmp_path / "a.mp4", "mp4v", moving(num_frames, 56, 84)))
    sampling = {"by": "count", "rule": "qwen3_vl", "num_frames": num_frames}
    recipe = {**VIDEO_RECIPE, "sampling": sampling, "min_pixels": 28 * 28}
    ours, meta = run_video_kernel(video, recipe)
    theirs, grid = run_video_processor(np.stack(list(video.frames(range(num_frames)))), recipe)
    assert meta["grid_thw"] == grid == [(num_frames + 1) // 2, 4, 6] and meta["num_tokens"] == ours.shape[0] // 4
    assert np.array_equal(ours, theirs)


def test_a_video_has_the_times_its_model_needs() -> None:
    _, meta = run_video_kernel(Video(h264()), VIDEO_RECIPE)
    assert (meta["video_fps"], meta["duration"], meta["total_num_frames"]) == (10.0, 2.5, 25)
    assert meta["frame_indices"] == [0, 6, 12, 18] and meta["timestamps"] == [0.0, 0.6, 1.2, 1.8]
    assert meta["grid_timestamps"] == [0.3, 1.5] and meta["grid_thw"] == [2, 4, 4]
    assert meta["fps"] == 1.6 and meta["second_per_grid_t"] == 1.25


def test_frames_are_those_of_the_video_or_resized_as_pillow_does() -> None:
    sampling = {"by": "count", "rule": "qwen3_vl", "num_frames": 3}
    recipe = {"kernel": "frames", "version": 1, "sampling": sampling}
    found, meta = run_video_kernel(Video(h264()), recipe)
    frames = np.stack(list(Video(h264()).frames([0, 12, 24])))
    assert np.array_equal(found, frames) and meta["frame_indices"] == [0, 12, 24]
    small, meta = run_video_kernel(Video(h264()), {**recipe, "height": 20, "width": 30, "resample": "lanczos"})
    assert small.shape == (3, 20, 30, 3) and meta["frame_indices"] == [0, 12, 24]
    resized = Image.fromarray(frames[1]).resize((30, 20), Image.Resampling.LANCZOS)
    assert np.array_equal(small[1], np.asarray(resized))


def test_rgb_is_the_decoded_image_shrunk_where_it_is_too_long() -> None:
    image = Image.fromarray(noise(1, 40, 100))
    recipe = {"kernel": "rgb", "version": 1}
    for limit, shape in ((None, (40, 100, 3)), (100, (40, 100, 3)), (50, (20, 50, 3)), (1, (1, 1, 3))):
        found, _ = run_kernel(image, recipe | ({"max_side": limit} if limit else {}))
        assert found.shape == shape
        expected = image if shape[1] == 100 else image.resize((shape[1], shape[0]), Image.Resampling.BICUBIC)
        assert np.array_equal(found, np.asarray(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "recipe.version is 3; this node runs version 1 of qwen_vl_video_patches"),
        ({"sampling": {"by": "magic"}}, "recipe.sampling is"),
        ({"sampling": {"by": "fps", "rule": "qwen2_vl", "fps": math.nan}}, "recipe.sampling.fps is nan"),
        ({"sampling": {"by": "fps", "rule": "qwen2_vl", "fps": 0}}, "recipe.sampling.fps is 0"),
        ({"sampling": {"by": "fps", "rule": "x", "fps": 1.0}}, "recipe.sampling.rule is 'x'"),
        ({"sampling": {"by": "count", "rule": "qwen2_vl", "num_frames": 1 << 20}}, "recipe.sampling.num_frames"),
        ({"sampling": {"by": "count", "rule": "qwen2_vl", "num_frames": 2, "x": 1}}, "sampling.x is 1: there is no"),
        ({"sampling": {"by": "count", "rule": "qwen2_vl", "num_frames": 2, "start_s": 2.0, "end_s": 1.0}}, "not after"),
        ({"kernel": "frames"}, "recipe.bounds is .* no such field"),
        ({"min_pixels": 1 << 29}, "above max_pixels"),
        ({"bounds": "both"}, "recipe.bounds is 'both'"),
    ],
)
def test_a_recipe_of_videos_is_closed_and_range_checked(change: dict[str, Any], message: str) -> None:
    from dataplane.core.errors import BadRequestError

    with pytest.raises(BadRequestError, match=message):
        parse_recipe({**VIDEO_RECIPE, **change})
