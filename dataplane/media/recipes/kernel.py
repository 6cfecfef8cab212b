"""The parts that every kernel shares: the base of its recipe, and the plan that it makes for a decoded medium."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from msgspec import Struct, to_builtins
from PIL import Image

from dataplane.media.videos import DEFAULT_DECODER, VideoDecoder

RESAMPLE = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
Resample = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Medium = Literal["image", "video"]
MAX_PIXELS = 1 << 26
"""The largest result of a kernel in pixels: per image, or per frame of a video."""
MAX_FRAMES = 1 << 14
"""The largest result of a kernel in frames."""


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all recipes: immutable, strict, and without unknown fields."""

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON-safe values, with every default filled in. The recipe digest is computed from
        them."""
        values: dict[str, Any] = to_builtins(self)
        return values


class VideoRecipe(Recipe, frozen=True, kw_only=True):
    """The base of the recipes of videos."""

    medium: ClassVar[Medium] = "video"

    decoder: VideoDecoder = DEFAULT_DECODER
    """The library that decodes the video. It is part of the recipe, because two libraries may differ in some pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan for one medium: what will be made of it. The plan is known before memory is allocated."""

    shape: tuple[int, ...]
    """The shape of the result, which is uint8."""
    meta: Mapping[str, Any]
    """What a scheduler needs to know about the result; JSON-safe."""
    pixel_bytes: int
    """The number of bytes of decoded pixels from which the result is made."""
    write: Callable[[np.ndarray], None]
    """Fills a flat, contiguous uint8 array of the result's size."""


class Kernel(Protocol):
    """A checked recipe with the code that makes the derived object. A ValueError from `plan` or `write` means that the
    medium is at fault."""

    medium: ClassVar[Medium]

    @property
    def kernel(self) -> str:
        """The name in the table of kernels."""
        ...

    def plan(self, source: Any) -> Plan:
        """Return the plan for an RGB `Image.Image`, or for a `dataplane.media.videos.Video`."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON-safe values, with every default filled in. The recipe digest is computed from
        them."""
        ...
