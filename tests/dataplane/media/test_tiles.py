"""Tests of the kernel of square tiles against transformers' own processor, and of its recipe's limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

import models  # noqa: F401  transformers' image processors import torchvision, which needs this on a CPU
from dataplane.core.errors import BadRequestError
from dataplane.media.recipes import parse_recipe
from dataplane.media.recipes.tiles import canvas
from tests.dataplane.shards import noise

pytestmark = pytest.mark.torch

RECIPE: dict[str, Any] = {
    "kernel": "tiles",
    "version": 1,
    "tile_size": 56,
    "patch_size": 14,
    "merge_size": 2,
    "min_tiles": 1,
    "max_tiles": 12,
    "resample": "bicubic",
}


def run_kernel(image: Image.Image, recipe: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
    plan = parse_recipe(recipe).plan(image)
    out = np.empty(math.prod(plan.shape), np.uint8)
    plan.write(out)
    return out.reshape(plan.shape), dict(plan.meta)


def run_transformers(image: Image.Image, recipe: dict[str, Any]) -> np.ndarray:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    processor = GotOcr2ImageProcessorPil(
        size={"height": recipe["tile_size"], "width": recipe["tile_size"]},
        crop_to_patches=True,
        min_patches=recipe["min_tiles"],
        max_patches=recipe["max_tiles"],
        do_rescale=False,
        do_normalize=False,
    )
    found: np.ndarray = processor(image, return_tensors="np")["pixel_values"]
    return found


SIDES = st.integers(1, 400)


@settings(max_examples=25, deadline=None)
@given(height=SIDES, width=SIDES, min_tiles=st.integers(1, 4), more=st.integers(0, 9), side=st.integers(1, 3))
@example(height=56, width=56, min_tiles=1, more=0, side=2)
@example(height=1, width=400, min_tiles=1, more=11, side=2)
@example(height=112, width=168, min_tiles=1, more=11, side=2)
def test_tiles_are_bit_equal_to_transformers(height: int, width: int, min_tiles: int, more: int, side: int) -> None:
    recipe = RECIPE | {"tile_size": 28 * side, "min_tiles": min_tiles, "max_tiles": min_tiles + more}
    image = Image.fromarray(noise(height * 1000 + width, height, width))
    ours, meta = run_kernel(image, recipe)
    theirs = run_transformers(image, recipe)
    assert np.array_equal(ours, theirs)
    assert meta["grid_thw"] == [len(theirs), 2 * side, 2 * side]
    assert meta["num_tokens"] == len(theirs) * side**2


@settings(max_examples=200, deadline=None)
@given(height=st.integers(1, 5000), width=st.integers(1, 5000), min_tiles=st.integers(1, 6), more=st.integers(0, 30))
def test_the_canvas_is_the_one_that_transformers_chooses(height: int, width: int, min_tiles: int, more: int) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    wanted = get_optimal_tiled_canvas((height, width), (448, 448), min_tiles, min_tiles + more)
    assert canvas(height, width, 448, min_tiles, min_tiles + more) == wanted


def test_tiles_go_row_by_row_and_the_whole_image_follows() -> None:
    pixels = np.zeros((56, 84, 3), np.uint8)
    pixels[:28, 28:56, 0], pixels[28:, :28, 2] = 10, 20
    tiles, meta = run_kernel(Image.fromarray(pixels), RECIPE | {"tile_size": 28})
    assert meta == {"grid_thw": [7, 2, 2], "num_tokens": 7}
    assert [[int(band.max()) for band in tile] for tile in tiles[:6]] == [
        [0, 0, 0],
        [10, 0, 0],
        [0, 0, 0],
        [0, 0, 20],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert tiles[6, 0].max() > 0 and tiles[6, 2].max() > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_tiles": 13}, "min_tiles 13 is above max_tiles 12; swap or widen them"),
        ({"tile_size": 57}, "tile_size 57 does not hold whole squares .* make it a multiple of 28"),
        ({"max_tiles": 65}, "recipe.max_tiles is 65"),
        ({"max_tiles": 64, "tile_size": 1120}, "make more than 67108864 pixels; lower one of them"),
        ({"thumbnail": True}, "recipe.thumbnail is True: there is no such field"),
    ],
)
def test_a_recipe_of_tiles_is_closed_and_range_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        parse_recipe(RECIPE | change)
