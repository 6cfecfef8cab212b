"""What every kernel shares: the closed schema of its recipe, and the plan it makes of a decoded medium."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict

RESAMPLE = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
Resample = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Medium = Literal["image", "video"]
MAX_PIXELS = 1 << 26
"""Of a result: per image, or per frame of a video."""
MAX_FRAMES = 1 << 14
"""Of a result."""


class Recipe(BaseModel):
    """Base of all recipes: immutable, strict, and without fields of somebody's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be made of one medium: known before there is room for it."""

    shape: tuple[int, ...]
    """Of the result, which is uint8."""
    meta: Mapping[str, Any]
    """What a scheduler must know of it; JSON-safe."""
    pixel_bytes: int
    """Decoded pixels that it is made of."""
    write: Callable[[np.ndarray], None]
    """Fills a flat, contiguous uint8 array of the result's size."""


class Kernel(Protocol):
    """A checked recipe that can plan. ValueError from `plan` or `write` means that the medium is at fault."""

    medium: ClassVar[Medium]

    @property
    def kernel(self) -> str:
        """Its name in the table of kernels."""
        ...

    def plan(self, source: Any) -> Plan:
        """The plan for an RGB `Image.Image`, or for a `dataplane.media.videos.Video`."""
        ...

    def model_dump(self) -> dict[str, Any]:
        """The recipe as JSON-safe values, with every default filled in: what its digest is taken of."""
        ...
