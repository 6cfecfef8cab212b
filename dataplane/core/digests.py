"""Names that follow from content: source digests, recipe digests, object names and content checksums (BLAKE3)."""

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

SOURCE_HEX = 32
RECIPE_HEX = 16
_MANY_THREADS_FROM = 1 << 22
"""From this size on hashing on every core is worth the wait for them."""


def content_digest(data: Any, *, on_one_core: bool = False) -> str:
    """32 hex digits of BLAKE3 over a buffer; also the checksum kept for derived objects."""
    max_threads = 1 if on_one_core or memoryview(data).nbytes < _MANY_THREADS_FROM else blake3.AUTO
    return digest_of(blake3(data, max_threads=max_threads))


def digest_of(hashed: blake3) -> str:
    """As `content_digest`, of what was hashed piece by piece."""
    return hashed.hexdigest()[:SOURCE_HEX]


def recipe_digest(recipe: Mapping[str, Any]) -> str:
    """16 hex digits that name a recipe; independent of the order of its keys."""
    text = json.dumps(dict(recipe), sort_keys=True, separators=(",", ":"))
    return blake3(text.encode()).hexdigest()[:RECIPE_HEX]


def source_name(digest: str) -> str:
    """The name of a source object."""
    return f"s/{digest}"


def derived_name(source_digest: str, recipe: Mapping[str, Any]) -> str:
    """The name of what `recipe` makes of a source."""
    return f"d/{source_digest}/{recipe_digest(recipe)}"


def version_of(digest: str) -> int:
    """The version of a plain object with this content: the first 63 bits of its digest; never 0."""
    return int(digest[:16], 16) >> 1 or 1
