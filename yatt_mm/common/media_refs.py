"""Derives images and videos through the data plane, each kind with its own recipe. Refs only; no torch, no pixel."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.client.client import Client
from dataplane.core.refs import BadMedia, Ref
from dataplane.media.kinds import MediaKind
from models.recipes.media_recipes import MediaRecipes

DERIVE_CHUNK = 64
"""The number of media per call to the data plane, so that each call stays well within its deadline."""


def kind_of(ref: Ref) -> MediaKind:
    """Return image or video, from the kind in the ref."""
    if "medium" not in ref.meta:
        raise ValueError(
            f"ref {ref.name} ({ref.kind}) does not say whether it is an image or a video; send refs that the data "
            "plane's samples or derive gave"
        )
    kind: MediaKind = ref.meta["medium"]
    return kind


def derive_media(client: Client, refs: Sequence[Ref], recipes: MediaRecipes) -> list[Ref | BadMedia]:
    """Have the patches of all media made, and return their refs, in order. A medium that cannot be decoded, or is
    refused, gives BadMedia."""
    made: dict[int, Ref | BadMedia] = {}
    for kind, places in _by_kind(refs).items():
        if not recipes.takes(kind):
            made |= {place: _refused(refs[place], kind) for place in places}
            continue
        for start in range(0, len(places), DERIVE_CHUNK):
            chunk = places[start : start + DERIVE_CHUNK]
            made |= zip(chunk, client.derive([refs[place] for place in chunk], recipes.of(kind)), strict=True)
    return [made[place] for place in range(len(refs))]


def _by_kind(refs: Sequence[Ref]) -> dict[MediaKind, list[int]]:
    places: dict[MediaKind, list[int]] = {}
    for place, ref in enumerate(refs):
        places.setdefault(kind_of(ref), []).append(place)
    return places


def _refused(ref: Ref, kind: MediaKind) -> BadMedia:
    dataset, shard = (ref.lineage.dataset, ref.lineage.shard) if ref.lineage else ("", "")
    return BadMedia(
        dataset=dataset, shard=shard, key="", reason=f"it is a {kind}, and the model's family takes none", name=ref.name
    )
