"""The interface of every file format: shards with numbered rows, and the place of the bytes of each medium.

The module of a format knows how to find its rows. Nothing here decodes media or knows refs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dataplane.media.kinds import MediaKind

MAX_MEDIUM_BYTES = 1 << 29
"""The maximum size of a medium in bytes: more than any image that would be decoded. A node reads whole media to compute
their digests."""
MAX_FIELDS_BYTES = 16 << 20
"""The maximum size of one sample's fields as JSON, in bytes, because fields are sent to controllers."""


class ByteSource(Protocol):
    """The holder of encoded bytes: a file, or a cell of a table."""

    @property
    def path(self) -> str: ...

    @property
    def is_local(self) -> bool:
        """True if a worker process can read the range from `path` itself."""
        ...

    @property
    def no_links(self) -> bool:
        """True if `path` must lead to the file without links."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes of a range. Raises DatasetError if they cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class MediumLocation:
    """The place of a medium's encoded bytes, and the formats that its file name promises."""

    file: ByteSource
    offset: int
    nbytes: int
    key: str
    """The place in words, for messages: the member's key, or row and part."""
    formats: tuple[str, ...]
    """The formats that its file name promises; an empty tuple promises nothing."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """A part of a shard that cannot be used, and the reason."""

    offset: int
    """The position: a byte of a tar, a row of the other formats; -1 if it is not known."""
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Medium:
    """A medium of a row, named by the digest of its bytes."""

    offset: int
    part: str
    """The column and place, such as `images/1`; empty in a tar, where the offset is enough."""
    nbytes: int
    digest: str
    kind: MediaKind


@dataclass(frozen=True, slots=True)
class Row:
    """One sample as its shard stores it."""

    key: str
    fields: Mapping[str, Any]
    media: tuple[Medium, ...]
    flaws: tuple[Flaw, ...]


class Shard(Protocol):
    """One indexed file of a dataset."""

    @property
    def num_samples(self) -> int: ...

    @property
    def flaws(self) -> Sequence[Flaw]:
        """The flaws that were found when the shard was indexed."""
        ...

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns that every shard of a dataset must share; None if each row has its own fields."""
        ...

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows with these numbers, in this order. Raises DatasetError if the shard changed since it was
        indexed."""
        ...

    def locate(self, offset: int, part: str, nbytes: int) -> MediumLocation | None:
        """Return the place of a medium; None unless the arguments are exactly those of a medium in this shard.
        `offset`, `part` and `nbytes` are those of its `Medium`."""
        ...


def extension_of(name: str) -> str:
    """Return the text after the last dot of a file name, in lower case; empty if there is no dot."""
    stem, _, extension = name.rpartition("/")[2].rpartition(".")
    return extension.lower() if stem else ""
