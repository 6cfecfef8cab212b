"""The kernel `rgb`: the pixels of an image without further processing, as [height, width, 3] uint8, for users with
their own processor."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from PIL import Image

from dataplane.media.recipes.kernel import RESAMPLE, Medium, Plan, Recipe, Resample

MAX_SIDE = 1 << 16


class Rgb(Recipe, frozen=True, kw_only=True):
    """The recipe of the kernel `rgb`. Unknown fields and values out of range are refused."""

    medium: ClassVar[Medium] = "image"

    kernel: Literal["rgb"]
    version: Literal[1]
    max_side: Annotated[int, Meta(ge=1, le=MAX_SIDE)] | None = None
    """The maximum length of the longer side in pixels; larger images are shrunk to it. None leaves every image as it
    is."""
    resample: Resample = "bicubic"

    def plan(self, source: Image.Image) -> Plan:
        """Return the plan for the image, which is shrunk if necessary."""
        width, height = shrink(source.width, source.height, self.max_side)

        def write(out: np.ndarray) -> None:
            image = source
            if image.size != (width, height):
                image = image.resize((width, height), RESAMPLE[self.resample])
            out.reshape(height, width, 3)[:] = np.asarray(image)

        return Plan(
            shape=(height, width, 3),
            meta={},
            pixel_bytes=source.width * source.height * 3,
            write=write,
        )


def shrink(width: int, height: int, max_side: int | None) -> tuple[int, int]:
    """Return the width and height after shrinking: the longer one is at most `max_side`, the ratio stays nearly the
    same, and none is below 1."""
    longest = max(width, height)
    if max_side is None or longest <= max_side:
        return width, height
    return max(1, round(width * max_side / longest)), max(1, round(height * max_side / longest))
