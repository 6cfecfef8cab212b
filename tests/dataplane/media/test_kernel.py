"""Tests of the patch kernel against transformers' own processor, and of its recipe's limits."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import models  # noqa: F401  transformers' Qwen2-VL code imports torchvision, which needs this on a CPU
from dataplane.core.errors import BadRequestError
from dataplane.media.recipes import parse_recipe
from tests.dataplane.shards import RECIPE, noise

pytestmark = pytest.mark.torch


def run_kernel(image: Image.Image, recipe: Mapping[str, Any]) -> tuple[np.ndarray, tuple[int, int]]:
    plan = parse_recipe(recipe).plan(image)
    out = np.empty(math.prod(plan.shape), np.uint8)
    plan.write(out)
    return out.reshape(plan.shape), tuple(plan.meta.get("grid_thw", [])[1:])


def run_transformers(image: Image.Image, recipe: dict[str, Any]) -> tuple[np.ndarray, list[list[int]]]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    keys = ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor = Qwen2VLImageProcessorPil(do_rescale=False, do_normalize=False, **{key: recipe[key] for key in keys})
        found = processor(image, return_tensors="np")
    return found["pixel_values"], found["image_grid_thw"].tolist()


def assert_equal(height: int, width: int, recipe: dict[str, Any]) -> None:
    image = Image.fromarray(noise(height * 1000 + width, height, width))
    ours, grid = run_kernel(image, recipe)
    theirs, grid_thw = run_transformers(image, recipe)
    assert grid_thw == [[1, *grid]]
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("height", "width"), [(8, 8), (1, 1), (1, 200), (200, 1), (28, 28), (29, 57), (224, 224), (480, 640), (1050, 1400)]
)
def test_patches_are_bit_equal_to_transformers(height: int, width: int) -> None:
    assert_equal(height, width, {**RECIPE, "max_pixels": 28 * 28 * 1280})


@settings(max_examples=25, deadline=None)
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    patch_size=st.sampled_from([14, 16]),
    merge_size=st.integers(1, 3),
    temporal_patch_size=st.integers(1, 3),
    min_side=st.integers(1, 60),
    max_side=st.integers(100, 300),
)
def test_patches_are_bit_equal_for_any_size_and_recipe(
    height: int, width: int, patch_size: int, merge_size: int, temporal_patch_size: int, min_side: int, max_side: int
) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    recipe = {
        **RECIPE,
        "patch_size": patch_size,
        "merge_size": merge_size,
        "temporal_patch_size": temporal_patch_size,
        "min_pixels": min_side**2,
        "max_pixels": max_side**2,
    }
    assert_equal(height, width, recipe)


def test_an_extreme_aspect_ratio_is_refused_by_both() -> None:
    image = Image.fromarray(noise(0, 1, 201))
    with pytest.raises(ValueError, match="aspect ratio 201 of 201x1; wanted at most 200"):
        run_kernel(image, dict(RECIPE))
    with pytest.raises(ValueError, match="aspect ratio"):
        run_transformers(image, dict(RECIPE))


def test_a_field_that_is_missing_is_called_so() -> None:
    sampling = {"by": "count", "num_frames": 3}
    with pytest.raises(BadRequestError, match=r"^recipe\.sampling\.rule is missing; docs"):
        parse_recipe({"kernel": "frames", "version": 1, "sampling": sampling})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "os.system"}, "recipe.kernel is 'os.system'; wanted one of .*qwen_vl_patches"),
        ({"kernel": ["x"]}, "recipe.kernel"),
        ({"version": 2}, "recipe.version is 2; this node runs version 1 of qwen_vl_patches"),
        ({"patch_size": 0}, "recipe.patch_size is 0"),
        ({"patch_size": "14"}, "recipe.patch_size is '14'"),
        ({"merge_size": 9}, "recipe.merge_size"),
        ({"max_pixels": 1 << 40}, "recipe.max_pixels"),
        ({"min_pixels": 1 << 20}, "min_pixels 1048576 is above max_pixels"),
        ({"resample": "magic"}, "recipe.resample is 'magic'; wanted one of nearest, bilinear, bicubic, lanczos"),
        ({"path": "/etc/passwd"}, "recipe.path is '/etc/passwd': there is no such field"),
    ],
)
def test_a_recipe_is_closed_and_range_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        parse_recipe({**RECIPE, **change})


def test_every_field_that_is_wrong_is_named() -> None:
    sampling = {"by": "fps", "rule": "magic", "fps": 0.0, "start_s": True, "far": 1}
    with pytest.raises(BadRequestError) as caught:
        parse_recipe({"kernel": "frames", "version": 1, "sampling": sampling, "multiple": 9, "height": "1"})
    assert sorted(problem.partition(" is ")[0] for problem in str(caught.value).split("; ") if " is " in problem) == [
        "recipe.height",
        "recipe.multiple",
        "recipe.sampling.far",
        "recipe.sampling.fps",
        "recipe.sampling.rule",
        "recipe.sampling.start_s",
    ]
