"""A cell of a row that holds one medium: its place in a file, or the reason why there is none."""

from dataclasses import dataclass
from typing import Protocol

from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import extension_of
from dataplane.media.kinds import MEDIA_FORMATS, MediaKind


@dataclass(frozen=True, slots=True)
class Cell:
    """A medium of a row, or the reason why there is none."""

    part: str
    nbytes: int = 0
    digest: str = ""
    file: RangeFile | None = None
    """The file that workers can read. None if only the node can read the bytes, from the row."""
    offset: int = 0
    is_path: bool = False
    """True if the row names the file by path. The file may then change although the row does not."""
    reason: str = ""
    kind: MediaKind = "image"

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that the file's name promises. For bytes in a table this is empty, because the path beside them
        promises nothing."""
        return MEDIA_FORMATS.get(extension_of(self.file.path), ()) if self.file and self.is_path else ()


class HoldsCells(Protocol):
    """A shard whose rows hold the bytes of media."""

    def read_cell(self, row: int, part: str) -> bytes:
        """Return the bytes of one medium. Raises DatasetError if they cannot be read."""


@dataclass(frozen=True, slots=True)
class CellSource:
    """A cell of a row as a source of bytes. The node reads it, not the workers."""

    shard: HoldsCells
    path: str
    row: int
    part: str

    @property
    def is_local(self) -> bool:
        """False: workers cannot read a row."""
        return False

    @property
    def no_links(self) -> bool:
        """False: the path of the file may lead through symbolic links, because the owner of the node registered it."""
        return False

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a range of the cell."""
        return self.shard.read_cell(self.row, self.part)[offset : offset + nbytes]
