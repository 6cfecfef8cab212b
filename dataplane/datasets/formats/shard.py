"""What every format gives: shards with numbered rows, and for each medium of a row where its bytes are.

A format's own file says how its rows are found. Nothing here decodes media or knows of refs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dataplane.media.kinds import MediaKind

MAX_MEDIUM_BYTES = 1 << 29
"""More than any image that would be decoded; a node reads whole media to name them."""
MAX_FIELDS_BYTES = 16 << 20
"""Of one sample's fields as JSON: they travel to controllers."""


class ByteSource(Protocol):
    """What holds encoded bytes: a file, or a cell of a table."""

    @property
    def path(self) -> str: ...

    @property
    def is_local(self) -> bool:
        """Whether a worker process can read the range out of `path` by itself."""
        ...

    @property
    def no_links(self) -> bool:
        """Whether `path` must lead to the file without links."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """The bytes of a range. Raises DatasetError."""
        ...


@dataclass(frozen=True, slots=True)
class MediumLocation:
    """Where a medium's encoded bytes lie, and what its name says it is."""

    file: ByteSource
    offset: int
    nbytes: int
    key: str
    """How people find it: the member's key, or row and part."""
    formats: tuple[str, ...]
    """What its file name promises; empty promises nothing."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """A piece of a shard that cannot be used."""

    offset: int
    """Where: a byte of a tar, a row of the other formats; -1 where that is not known."""
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Medium:
    """A medium of a row, named by the digest of its bytes."""

    offset: int
    part: str
    """Column and place, such as `images/1`; empty in a tar, where the offset says it all."""
    nbytes: int
    digest: str
    kind: MediaKind


@dataclass(frozen=True, slots=True)
class Row:
    """One sample as its shard holds it."""

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
        """What was found to be unusable when the shard was indexed."""
        ...

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns that every shard of a dataset must share; None where rows have fields of their own."""
        ...

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The rows with these numbers, in this order. Raises DatasetError if the shard changed since it was indexed."""
        ...

    def locate(self, offset: int, part: str, nbytes: int) -> MediumLocation | None:
        """The place of a medium; None unless it is exactly one of this shard's."""
        ...


def extension_of(name: str) -> str:
    """What follows the last dot of a file name, in lower case; empty where there is none."""
    stem, _, extension = name.rpartition("/")[2].rpartition(".")
    return extension.lower() if stem else ""
