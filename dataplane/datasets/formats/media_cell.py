"""A cell of a row that holds one medium: its place in a file, or the reason why there is none."""

from dataclasses import dataclass

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
