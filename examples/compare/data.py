"""Makes pairs of handwritten digits with a question about both, as WebDataset shards. The same seed gives the same
bytes.

The scans are those of the digits example, in its two parts: the pairs to learn from use the scans of its train part,
and the held-out pairs the others. A sample is three members of a tar: `<key>.0.png`, `<key>.1.png` and `<key>.json`
with {"question", "answer"}. The question is a list of chat turns with a system turn, and `<image>` in the turn of the
user says where each image stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.digits import data as digits
from examples.shards import write_parts

SYSTEM = "Compare the two digits. Answer with the larger one."
QUESTION = "Which digit is larger, <image> or <image>?"
CHAT = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION})
"""The question of every sample: turns of a chat."""
ANSWERS = tuple("123456789")
"""All possible answers: the larger one of two different digits."""
NUM_TRAIN = 6000
NUM_HELD_OUT = 400
NUM_TRAIN_SHARDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two scans of different digits, of which the larger one is the answer."""

    key: str
    """The name inside the shard: the pair's number in its part."""
    pngs: tuple[bytes, bytes]
    """The scans as PNG, in the order of the question: 8-bit grey, 56 pixels on each side."""
    digits: tuple[str, str]
    """The digits of the scans, in the same order."""
    answer: str
    """The right answer: the larger digit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Pairs to learn from, and held-out pairs. No scan is used in both parts; a scan is in several pairs of its
    part."""

    scans: digits.Split
    """The scans of both parts."""
    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]


def make_split(*, seed: int = 0, num_train: int = NUM_TRAIN, num_held_out: int = NUM_HELD_OUT) -> Split:
    """Return pairs that the seed draws from the two parts of the digits example."""
    scans = digits.make_split(seed=seed)
    generator = np.random.default_rng(seed)
    return Split(
        scans=scans,
        train=_draw_pairs(scans.train, num_train, generator),
        held_out=_draw_pairs(scans.held_out, num_held_out, generator),
    )


def write_shards(directory: Path, split: Split) -> list[Path]:
    """Write train-*.tar and eval-*.tar into `directory`. Return their paths."""
    parts = (("train", split.train, NUM_TRAIN_SHARDS), ("eval", split.held_out, 1))
    return write_parts(directory, parts, _members)


def _draw_pairs(
    scans: Sequence[digits.DigitSample], num_pairs: int, generator: np.random.Generator
) -> tuple[Pair, ...]:
    """Return pairs of scans of different digits."""
    pairs: list[Pair] = []
    while len(pairs) < num_pairs:
        first, second = (scans[place] for place in generator.integers(len(scans), size=2))
        seen = (first.answer, second.answer)
        if seen[0] != seen[1]:
            pairs.append(Pair(key=f"{len(pairs):04d}", pngs=(first.png, second.png), digits=seen, answer=max(seen)))
    return tuple(pairs)


def _members(pair: Pair) -> dict[str, Any]:
    return {
        "__key__": pair.key,
        "0.png": pair.pngs[0],
        "1.png": pair.pngs[1],
        "json": {"question": CHAT, "answer": pair.answer},
    }
