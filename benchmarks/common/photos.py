"""Makes shards of JPEGs of 1 to 2 megapixels from scikit-learn's two sample photographs.

A few hundred different pictures are cropped, mirrored and scaled out of the two. The other pictures repeat them with
another comment inside, so that no two files have the same digest.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

MIN_PIXELS, MAX_PIXELS = 1_000_000, 2_000_000
SHARD_BYTES = 256 << 20


def photographs(count: int, seed: int = 0) -> list[bytes]:
    """Return this many different JPEGs."""
    rng = np.random.default_rng(seed)
    originals = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    return [_photograph(originals[at % len(originals)], rng) for at in range(count)]


def variants(pictures: list[bytes], seed: int) -> Iterator[bytes]:
    """Yield the pictures again and again, but never the same bytes twice."""
    number = 0
    while True:
        for picture in pictures:
            comment = b"%16d%16d" % (seed, number)
            yield picture[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + picture[2:]
            number += 1


def write_shards(folder: Path, pictures: Iterator[bytes], total_bytes: int) -> int:
    """Fill `folder` with tars until they hold this many bytes of pictures. Return the number of pictures."""
    folder.mkdir()
    count = written = 0
    while written < total_bytes:
        start = written
        with tarfile.open(folder / f"photos-{count:08d}.tar", "w") as tar:
            while written < total_bytes and written - start < SHARD_BYTES:
                picture = next(pictures)
                info = tarfile.TarInfo(f"{count:08d}.jpg")
                info.size = len(picture)
                tar.addfile(info, io.BytesIO(picture))
                written += len(picture)
                count += 1
    return count


def _photograph(original: Image.Image, rng: np.random.Generator) -> bytes:
    """Return a random part of the original at a random size, with grain, mirrored or not."""
    part = rng.uniform(0.6, 1.0, 2) * original.size
    left, top = rng.uniform(0, 1, 2) * (np.array(original.size) - part)
    pixels = rng.uniform(MIN_PIXELS, MAX_PIXELS)
    width = int((pixels * part[0] / part[1]) ** 0.5)
    size, box = (width, int(pixels / width)), (left, top, left + part[0], top + part[1])
    image = original.resize(size, Image.Resampling.BICUBIC, box)
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    grain = rng.normal(0, 4, (image.height, image.width, 1))
    noisy = np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(noisy).save(encoded, "JPEG", quality=88)
    return encoded.getvalue()
