"""The caches that all shards of a node share. All of them are bounded."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dataplane.core.lru_cache import LruCache
from dataplane.datasets.formats.media_cell import Cell

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

GROUP_CACHE_BYTES = 64 << 20
"""The limit of the cache of row groups, in bytes. A larger group is used for one call and dropped."""
ENCODED_CACHE_BYTES = 16 << 20
"""The limit, in bytes, of the encoded media that were read for their digest and wait for the decoder."""
FOOTER_CACHE_BYTES = 8 << 20
NUM_NAMED_ROWS = 1 << 16
"""The limit of the cache of rows whose media can be named without another read, in rows of about 0.4 kB."""
NUM_NAMED_FILES = 1 << 16


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches of what was read from files. The shards of all datasets of a node share them."""

    groups: "LruCache[pa.Table]" = field(default_factory=lambda: LruCache(GROUP_CACHE_BYTES))
    encoded: LruCache[bytes] = field(default_factory=lambda: LruCache(ENCODED_CACHE_BYTES))
    """Encoded media by digest. Who decodes one takes it out."""
    footers: "LruCache[pq.FileMetaData]" = field(default_factory=lambda: LruCache(FOOTER_CACHE_BYTES))
    rows: "LruCache[tuple[Cell, ...]]" = field(default_factory=lambda: LruCache(NUM_NAMED_ROWS))
    file_digests: LruCache[str] = field(default_factory=lambda: LruCache(NUM_NAMED_FILES))
