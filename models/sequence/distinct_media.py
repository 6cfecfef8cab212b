"""Finds the distinct media of a microbatch, and divides the work of encoding them among ranks. No torch, nothing is
sent.

Every rank of a replica computes the same from grids and keys alone, so a rank needs only the patches of its own share.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from models.sequence.mrope import Grid


class HasMedia(Protocol):
    """The part of a training sample that this module needs."""

    @property
    def grid_thw(self) -> tuple[Grid, ...]:
        """The grid (t, h, w) in patches of each medium."""

    @property
    def patches(self) -> Sequence[np.ndarray | None]:
        """The patches of each medium: uint8 [num_patches, D], or its t tiles [t, C, S, S]; None for media that other
        ranks encode; empty if no patches are needed."""

    @property
    def media_keys(self) -> Sequence[str]:
        """The name of each medium (a digest), for comparing media. Without keys, array objects are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctMedia:
    """The distinct media of a microbatch, in order of first appearance."""

    grids: tuple[Grid, ...]
    """The grid (t, h, w) in patches of each distinct medium."""
    patches: tuple[np.ndarray | None, ...]
    """The patches of each distinct medium, in the form of the samples; None if this rank has no patches of it."""
    numbers: tuple[tuple[int, ...], ...]
    """The number of the distinct medium, by [sample][medium]."""


def distinct_media(samples: Sequence[HasMedia]) -> DistinctMedia:
    """Return the distinct media of the samples. Raises ValueError, naming the sample, if patches do not belong to the
    grids."""
    number_of: dict[Hashable, int] = {}
    grids: list[Grid] = []
    patches: list[np.ndarray | None] = []
    numbers: list[tuple[int, ...]] = []
    for position, sample in enumerate(samples):
        _check(position, sample)
        given: Sequence[np.ndarray | None] = sample.patches or [None] * len(sample.grid_thw)
        keys: Sequence[Hashable] = sample.media_keys or [
            (position, place) if array is None else id(array) for place, array in enumerate(given)
        ]
        own = []
        for key, grid, array in zip(keys, sample.grid_thw, given, strict=True):
            number = number_of.setdefault((key, grid), len(grids))
            if number == len(grids):
                grids.append(grid)
                patches.append(array)
            elif patches[number] is None:
                patches[number] = array
            own.append(number)
        numbers.append(tuple(own))
    return DistinctMedia(grids=tuple(grids), patches=tuple(patches), numbers=tuple(numbers))


def own_media(samples: Sequence[HasMedia], *, rank: int, num_ranks: int) -> list[tuple[bool, ...]]:
    """Return [sample][medium] True if rank `rank` of `num_ranks` encodes the medium and needs its patches."""
    media = distinct_media(samples)
    mine = set(deal_media(media.grids, num_ranks)[rank])
    return [tuple(number in mine for number in own) for own in media.numbers]


def deal_media(grids: Sequence[Grid], num_ranks: int) -> list[list[int]]:
    """Return, for each rank, the numbers of the media that it encodes, ascending. The media are assigned in order of
    their size, largest first, each to the rank with the fewest patches so far."""
    costs = [t * h * w for t, h, w in grids]
    load = [0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        rank = min(range(num_ranks), key=load.__getitem__)
        shares[rank].append(number)
        load[rank] += costs[number]
    return [sorted(share) for share in shares]


def _check(position: int, sample: HasMedia) -> None:
    num_media = len(sample.grid_thw)
    if sample.patches and len(sample.patches) != num_media:
        raise ValueError(
            f"sample {position} has {len(sample.patches)} media's patches and {num_media} grids; give patches, "
            "or None, for every medium"
        )
    if sample.media_keys and len(sample.media_keys) != num_media:
        raise ValueError(
            f"sample {position} has {len(sample.media_keys)} media keys and {num_media} grids; wanted one each"
        )
    for array, (t, h, w) in zip(sample.patches, sample.grid_thw):
        if array is not None and array.shape[0] != (t if array.ndim == 4 else t * h * w):
            raise ValueError(
                f"sample {position}: {array.shape[0]} {'tiles' if array.ndim == 4 else 'patches'} do not fill the grid "
                f"{(t, h, w)}; patches and grid must come from one medium and one recipe"
            )
