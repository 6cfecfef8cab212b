"""The kernel `tiles`: square tiles of an image for InternVL. It resizes once with Pillow, cuts band by band, and keeps
uint8.

The result is bit-equal to transformers' GotOcr2ImageProcessorPil with crop_to_patches=True, do_rescale=False and
do_normalize=False. The canvas has the aspect ratio nearest to the image's among those that the allowed numbers of tiles
can make. If there is more than one tile, the whole image follows as an additional tile. A tile is not cut into patches:
the grid only says how many patches a model will see.

Axes: n tiles, row by row, the whole image last; 3 bands; S = tile_size.
"""

from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from PIL import Image

from dataplane.media.recipes.kernel import MAX_PIXELS, RESAMPLE, Medium, Plan, Recipe, Resample

MAX_TILES = 64


class Tiles(Recipe, frozen=True, kw_only=True):
    """The recipe of the kernel `tiles`. Unknown fields and values out of range are refused."""

    medium: ClassVar[Medium] = "image"

    kernel: Literal["tiles"]
    version: Literal[1]
    tile_size: Annotated[int, Meta(ge=1, le=4096)]
    patch_size: Annotated[int, Meta(ge=1, le=64)]
    merge_size: Annotated[int, Meta(ge=1, le=8)]
    """The number of patches per visual token along each side."""
    min_tiles: Annotated[int, Meta(ge=1, le=MAX_TILES)]
    max_tiles: Annotated[int, Meta(ge=1, le=MAX_TILES)]
    """The maximum number of tiles. The whole image, which follows if there are several tiles, is not counted."""
    resample: Resample

    def __post_init__(self) -> None:
        if self.min_tiles > self.max_tiles:
            raise ValueError(f"min_tiles {self.min_tiles} is above max_tiles {self.max_tiles}; swap or widen them")
        if self.tile_size % (self.patch_size * self.merge_size):
            raise ValueError(
                f"tile_size {self.tile_size} does not hold whole squares of {self.merge_size} x {self.merge_size} "
                f"patches of {self.patch_size}; make it a multiple of {self.patch_size * self.merge_size}"
            )
        if (self.max_tiles + 1) * self.tile_size**2 > MAX_PIXELS:
            raise ValueError(
                f"max_tiles {self.max_tiles} of tile_size {self.tile_size} and the whole image make more than "
                f"{MAX_PIXELS} pixels; lower one of them"
            )

    def plan(self, source: Image.Image) -> Plan:
        """Return the plan for the tiles of an RGB image of any shape."""
        size = self.tile_size
        columns, rows = canvas(source.height, source.width, size, self.min_tiles, self.max_tiles)
        num_cut = rows * columns
        num_tiles = num_cut + (num_cut > 1)
        side = size // self.patch_size

        def write(out: np.ndarray) -> None:
            tiles = out.reshape(num_tiles, 3, size, size)
            _write_cut(self._resized(source, columns, rows), tiles[:num_cut], columns)
            if num_cut > 1:
                _write_cut(self._resized(source, 1, 1), tiles[num_cut:], 1)

        return Plan(
            shape=(num_tiles, 3, size, size),
            meta={"grid_thw": [num_tiles, side, side], "num_tokens": num_tiles * (side // self.merge_size) ** 2},
            pixel_bytes=source.width * source.height * 3,
            write=write,
        )

    def _resized(self, source: Image.Image, columns: int, rows: int) -> Image.Image:
        wanted = (columns * self.tile_size, rows * self.tile_size)
        return source if source.size == wanted else source.resize(wanted, RESAMPLE[self.resample])


@lru_cache(maxsize=4096)
def canvas(height: int, width: int, tile_size: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Return the columns and rows of the canvas whose aspect ratio is nearest to the image's.

    If two canvases are equally near, the larger one is chosen when the image has more than half of its pixels.
    """
    sides = range(1, max_tiles + 1)
    shapes = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    best, least = (1, 1), float("inf")
    for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        distance = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * tile_size**2 * columns * rows
        if distance < least or (distance == least and is_filled):
            best, least = (columns, rows), distance
    return best


def _write_cut(image: Image.Image, tiles: np.ndarray, columns: int) -> None:
    """Cut an image into `tiles` [n, 3, S, S], where n is a multiple of `columns`. Whole rows of a tile are copied at
    once."""
    size = tiles.shape[-1]
    rows = len(tiles) // columns
    target = tiles.view(np.dtype((np.void, size))).reshape(rows, columns, 3, size)
    for channel, band in enumerate(image.split()):
        lines = np.asarray(band).view(target.dtype).reshape(rows, size, columns)
        target[:, :, channel] = lines.transpose(0, 2, 1)
