"""Makes clips of handwritten digits that cross a canvas, as MP4 in WebDataset shards. The same seed gives the same
bytes.

The scans are scikit-learn's (see examples/digits). Each moves left, right, up or down. Its start and its distance are
random, and the canvas has the size that the model's processor keeps unchanged. A sample is two members of a tar:
`<key>.mp4` and `<key>.json` with {"question", "answer"}.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2  # before decord is, anywhere: each brings a libvpx, and the first one loaded serves both
import numpy as np

from examples.shards import write_parts

QUESTION = "Which way does it go?"
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""The movement for each answer: rows and columns per pixel of the distance."""
CANVAS_SIDE = 56
"""The side of the canvas in pixels: 4 x 4 patches of 14, merged 2 x 2 into 4 visual tokens for every two frames."""
DIGIT_SIDE = 24
NUM_FRAMES = 8
FPS = 8.0
DISTANCE = (18, 28)
"""The minimum and maximum distance in pixels."""
NUM_TRAIN = 1500
NUM_TRAIN_SHARDS = 3
MAX_GREY_LEVEL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One video with its question and its answer."""

    key: str
    """The name inside the shard: the scan's number in `load_digits`."""
    mp4: bytes
    """The video as MP4: `NUM_FRAMES` frames, `CANVAS_SIDE` pixels on each side, `FPS` frames a second."""
    question: str
    answer: str
    """The right answer: one of `DIRECTIONS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """All clips, divided into a training part and a held-out part. No scan of a digit is used in both."""

    train: tuple[Clip, ...]
    held_out: tuple[Clip, ...]


def make_split(*, seed: int = 0, num_train: int = NUM_TRAIN, num_held_out: int | None = None) -> Split:
    """Return one clip of every scan, shuffled by the seed: `num_train` to learn from, and the others (or `num_held_out`
    of them) held out."""
    from sklearn.datasets import load_digits  # takes a second

    digits = load_digits()
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(digits.target))
    stop = len(order) if num_held_out is None else num_train + num_held_out
    with tempfile.TemporaryDirectory() as folder:
        clips = [_make_clip(int(i), digits.images[i], generator, Path(folder)) for i in order[:stop]]
    return Split(train=tuple(clips[:num_train]), held_out=tuple(clips[num_train:]))


def write_shards(directory: Path, split: Split) -> list[Path]:
    """Write train-*.tar and eval-*.tar into `directory`. Return their paths."""
    parts = (("train", split.train, NUM_TRAIN_SHARDS), ("eval", split.held_out, 1))
    return write_parts(directory, parts, _members)


def make_frames(scan: np.ndarray, direction: str, start: tuple[int, int], distance: int) -> np.ndarray:
    """Return [T, CANVAS_SIDE, CANVAS_SIDE, 3] uint8: the scan on black, which moves from `start` (row, column) over the
    distance."""
    grey = np.round(scan * (255 / MAX_GREY_LEVEL)).astype(np.uint8)
    digit = cv2.resize(grey, (DIGIT_SIDE, DIGIT_SIDE), interpolation=cv2.INTER_CUBIC)
    frames = np.zeros((NUM_FRAMES, CANVAS_SIDE, CANVAS_SIDE, 3), np.uint8)
    rows, columns = DIRECTIONS[direction]
    for at, frame in enumerate(frames):
        way = round(distance * at / (NUM_FRAMES - 1))
        row, column = start[0] + rows * way, start[1] + columns * way
        frame[row : row + DIGIT_SIDE, column : column + DIGIT_SIDE] = digit[:, :, None]
    return frames


def _make_clip(number: int, scan: np.ndarray, generator: np.random.Generator, folder: Path) -> Clip:
    direction = list(DIRECTIONS)[generator.integers(len(DIRECTIONS))]
    distance = int(generator.integers(*DISTANCE, endpoint=True))
    room = CANVAS_SIDE - DIGIT_SIDE
    low = [distance if step < 0 else 0 for step in DIRECTIONS[direction]]
    high = [room - distance if step > 0 else room for step in DIRECTIONS[direction]]
    row, column = (int(generator.integers(least, most, endpoint=True)) for least, most in zip(low, high))
    frames = make_frames(scan, direction, (row, column), distance)
    mp4 = _encode(frames, folder / "clip.mp4")
    return Clip(key=f"{number:04d}", mp4=mp4, question=QUESTION, answer=direction)


def _encode(frames: np.ndarray, path: Path) -> bytes:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), FPS, (CANVAS_SIDE, CANVAS_SIDE))
    if not writer.isOpened():
        raise RuntimeError("OpenCV cannot encode MPEG-4 here; install opencv-python-headless from a wheel")
    for frame in frames:
        writer.write(frame)
    writer.release()
    return path.read_bytes()


def _members(clip: Clip) -> dict[str, Any]:
    return {"__key__": clip.key, "mp4": clip.mp4, "json": {"question": clip.question, "answer": clip.answer}}
