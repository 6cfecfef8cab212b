"""Makes WebDataset tar shards of real handwritten digits. The same seed gives the same bytes.

The scans come with scikit-learn (`load_digits`: 1,797 images of 8 x 8 pixels in 17 grey levels, UCI ML repository's
optical recognition of handwritten digits). They are enlarged here to the size that the model's processor keeps
unchanged, so no resize kernel is used between a shard and the model. A sample is two members of a tar: `<key>.png` and
`<key>.json` with {"question", "answer"}.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from examples.shards import write_parts

QUESTION = "What digit is this?"
IMAGE_SIDE = 56
"""The side of an image in pixels: 4 x 4 patches of 14, merged 2 x 2 into 4 visual tokens."""
NUM_TRAIN = 1500
NUM_TRAIN_SHARDS = 3
NUM_EVAL_SHARDS = 1
MAX_GREY_LEVEL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitSample:
    """One scan with its question and its answer."""

    key: str
    """The name inside the shard: the scan's number in `load_digits`."""
    png: bytes
    """The scan as PNG: 8-bit grey, `IMAGE_SIDE` pixels on each side."""
    question: str
    answer: str
    """The right answer: one digit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """All samples, each in exactly one of the two parts."""

    train: tuple[DigitSample, ...]
    held_out: tuple[DigitSample, ...]


def make_split(*, seed: int = 0) -> Split:
    """Return every scan once, shuffled by the seed: `NUM_TRAIN` to learn from, and the others held out."""
    from sklearn.datasets import load_digits  # takes a second

    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    samples = tuple(_make_sample(int(i), digits.images[i], int(digits.target[i])) for i in order)
    return Split(train=samples[:NUM_TRAIN], held_out=samples[NUM_TRAIN:])


def write_shards(directory: Path, split: Split) -> list[Path]:
    """Write train-*.tar and eval-*.tar into `directory`. Return their paths."""
    parts = (("train", split.train, NUM_TRAIN_SHARDS), ("eval", split.held_out, NUM_EVAL_SHARDS))
    return write_parts(directory, parts, _members)


def _make_sample(index: int, levels: np.ndarray, digit: int) -> DigitSample:
    grey = np.round(levels * (255 / MAX_GREY_LEVEL)).astype(np.uint8)
    image = Image.fromarray(grey).resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC)
    png = io.BytesIO()
    image.save(png, format="PNG")
    return DigitSample(key=f"{index:04d}", png=png.getvalue(), question=QUESTION, answer=str(digit))


def _members(sample: DigitSample) -> dict[str, Any]:
    return {"__key__": sample.key, "png": sample.png, "json": {"question": sample.question, "answer": sample.answer}}
