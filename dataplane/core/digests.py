"""Digests and the object names made from them: content digests, recipe digests, names of sources and derived objects.

All digests are truncated BLAKE3, as lower-case hex. The same content or recipe has the same digest on every node.
"""

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

SOURCE_HEX = 32
"""The number of hex digits of a content digest (128 bits)."""
RECIPE_HEX = 16
"""The number of hex digits of a recipe digest (64 bits)."""
_MANY_THREADS_FROM = 1 << 22
"""The size in bytes from which all cores hash a buffer; for less, starting the threads costs more than it saves."""


def content_digest(data: Any, *, on_one_core: bool = False) -> str:
    """Return the digest of a buffer's bytes: 32 hex digits of BLAKE3. It is also the checksum of derived objects."""
    max_threads = 1 if on_one_core or memoryview(data).nbytes < _MANY_THREADS_FROM else blake3.AUTO
    return digest_of(blake3(data, max_threads=max_threads))


def digest_of(hashed: blake3) -> str:
    """Return the same digest as `content_digest` for bytes that were fed to a hasher piece by piece."""
    return hashed.hexdigest()[:SOURCE_HEX]


def recipe_digest(recipe: Mapping[str, Any]) -> str:
    """Return the 16 hex digits that identify a recipe. The order of its keys makes no difference."""
    text = json.dumps(dict(recipe), sort_keys=True, separators=(",", ":"))
    return blake3(text.encode()).hexdigest()[:RECIPE_HEX]


def source_name(digest: str) -> str:
    """Return the object name of the source with this digest: `s/<digest>`."""
    return f"s/{digest}"


def derived_name(source_digest: str, recipe: Mapping[str, Any]) -> str:
    """Return the name of the object that `recipe` makes from a source: `d/<source digest>/<recipe digest>`."""
    return f"d/{source_digest}/{recipe_digest(recipe)}"


def version_of(digest: str) -> int:
    """Return the version of a plain object with this content digest: the first 63 bits of the digest as a number, never
    0."""
    return int(digest[:16], 16) >> 1 or 1
