"""The caches that all shards of a node share. All of them are bounded. Parsers have caches of their own."""

from dataclasses import dataclass, field

from dataplane.core.lru_cache import LruCache
from dataplane.datasets.formats.media_cell import Cell
from dataplane.datasets.formats.media_values import MediaValue
from dataplane.datasets.formats.parsed_rows import ReceivedRow

ENCODED_CACHE_BYTES = 16 << 20
"""The limit, in bytes, of the encoded media that were read for their digest and wait for the decoder."""
FIELDS_CACHE_BYTES = 16 << 20
"""The limit, in bytes of memory, of the fields that were parsed and may be asked for again."""
NUM_NAMED_ROWS = 1 << 16
"""The limit of the cache of rows whose media can be named without another read, in rows of about 0.4 kB."""
NUM_NAMED_FILES = 1 << 16


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches of what was read from files. The shards of all datasets of a node share them."""

    encoded: LruCache[bytes] = field(default_factory=lambda: LruCache(ENCODED_CACHE_BYTES))
    """Encoded media by digest. Who decodes one takes it out."""
    rows: "LruCache[tuple[Cell, ...]]" = field(default_factory=lambda: LruCache(NUM_NAMED_ROWS))
    objects: "LruCache[tuple[MediaValue | Cell, ...]]" = field(default_factory=lambda: LruCache(NUM_NAMED_ROWS))
    """The media of objects in JSON files: what they name by path, and the digests of what they hold."""
    fields: "LruCache[ReceivedRow]" = field(default_factory=lambda: LruCache(FIELDS_CACHE_BYTES))
    """The fields of the rows that were parsed last, without media."""
    file_digests: LruCache[str] = field(default_factory=lambda: LruCache(NUM_NAMED_FILES))
