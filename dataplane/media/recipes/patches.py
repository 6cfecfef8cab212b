"""Writes frames as patches, in the order of Qwen-VL. Every pixel passes through this code, so each is moved as few
times as possible.

Pillow splits a frame into its three bands. Each band is written with one strided copy whose items are rows of a patch
(`V14`: 14 bytes at once). This is several times faster than a copy of single bytes.

The order of the values in the array that is written: blocks of merge x merge patches; each patch has 3 bands x temporal
x patch x patch values.
"""

from collections.abc import Iterable

import numpy as np
from PIL import Image


def write_frame(image: Image.Image, out: np.ndarray, patch: int, merge: int, temporal: int, at: int) -> None:
    """Write an RGB frame into `out` (flat uint8), as number `at` of the `temporal` frames of its patches."""
    rows, columns = image.height // patch, image.width // patch
    item = np.dtype((np.void, patch))
    target = out.view(item).reshape(rows // merge, columns // merge, merge, merge, 3, temporal, patch)
    for channel, band in enumerate(image.split()):
        blocks = np.asarray(band).view(item).reshape(rows // merge, merge, patch, columns // merge, merge)
        target[:, :, :, :, channel, at] = blocks.transpose(0, 3, 1, 4, 2)


def repeat_frame(out: np.ndarray, patch: int, temporal: int, source: int, places: Iterable[int]) -> None:
    """In every patch of `out` (flat uint8, `temporal` frames in each patch), copy the frame number `source` over the
    frames with the numbers `places`."""
    squares = out.view(np.dtype((np.void, patch * patch))).reshape(-1, 3, temporal)
    for at in places:
        squares[:, :, at] = squares[:, :, source]
