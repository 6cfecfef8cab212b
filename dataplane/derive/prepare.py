"""Samples with their media derived, in one call: rows are read, and their media are hashed, decoded and described by
refs.

The samples are taken in windows. While one window is decoded the next one is read, so that the decoder gets the encoded
bytes that were read for the digests.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dataplane.core.refs import BadMedia, Ref, Sample
from dataplane.datasets.catalog import Catalog
from dataplane.derive.deriver import Begun, Deriver

WINDOW_SAMPLES = 16

Recipes = Mapping[str, Mapping[str, Any]]
"""A recipe for each kind of media: `image`, `video`."""


def prepare(
    datasets: Catalog, deriver: Deriver, dataset: str, indices: Sequence[int], recipes: Recipes, deadline: float
) -> list[Sample]:
    """Return the samples at these positions. Their `media` are derived refs; a medium that cannot be decoded, or has no
    recipe, is in `bad` instead.

    Waits for: the pool, and for room in the arena. Raises NodeTimeoutError at `deadline` (monotonic).
    """
    prepared: list[Sample] = []
    earlier: tuple[list[Sample], dict[str, Begun]] = ([], {})
    for window in _windows(datasets, dataset, indices):
        begun = {
            kind: deriver.begin(refs, recipes[kind], deadline)
            for kind, refs in _by_kind(window).items()
            if kind in recipes
        }
        prepared += _finished(deriver, *earlier, deadline)
        earlier = window, begun
    return prepared + _finished(deriver, *earlier, deadline)


def prefetch(datasets: Catalog, deriver: Deriver, dataset: str, indices: Sequence[int], recipes: Recipes) -> int:
    """Begin what `prepare` does, behind all work that callers wait for, and return how many samples, counted from the
    first, were taken. Waits for nothing but the reading of the rows."""
    num_taken = 0
    for window in _windows(datasets, dataset, indices):
        for sample in window:
            for kind, refs in _by_kind([sample]).items():
                if kind in recipes and deriver.prefetch(refs, recipes[kind]) < len(refs):
                    return num_taken
            num_taken += 1
    return num_taken


def _windows(datasets: Catalog, dataset: str, indices: Sequence[int]) -> Iterator[list[Sample]]:
    for start in range(0, len(indices), WINDOW_SAMPLES):
        yield datasets.samples(dataset, indices[start : start + WINDOW_SAMPLES])


def _finished(deriver: Deriver, samples: Sequence[Sample], begun: Mapping[str, Begun], deadline: float) -> list[Sample]:
    """Return the samples with the results of their media."""
    made = {kind: iter(deriver.finish(of_kind, deadline)) for kind, of_kind in begun.items()}
    prepared = []
    for sample in samples:
        kinds = [(ref, _kind_of(ref)) for ref in sample.media]
        results = [next(made[kind]) if kind in made else _without_recipe(ref, kind) for ref, kind in kinds]
        media = tuple(result for result in results if isinstance(result, Ref))
        bad = tuple(result for result in results if isinstance(result, BadMedia))
        prepared.append(replace(sample, media=media, bad=(*sample.bad, *bad)))
    return prepared


def _by_kind(samples: Sequence[Sample]) -> dict[str, list[Ref]]:
    found: dict[str, list[Ref]] = {}
    for sample in samples:
        for ref in sample.media:
            found.setdefault(_kind_of(ref), []).append(ref)
    return found


def _kind_of(source: Ref) -> str:
    return str(source.meta["medium"])


def _without_recipe(ref: Ref, kind: str) -> BadMedia:
    dataset, shard = (ref.lineage.dataset, ref.lineage.shard) if ref.lineage else ("", "")
    reason = f"it is a {kind}, and no recipe for {kind}s was given: the model may take none"
    return BadMedia(dataset=dataset, shard=shard, key="", reason=reason, name=ref.name)
