"""From what a row says of its media to media with names: what tables and JSON lines have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dataplane.byte_ranges import RangeFile
from dataplane.digests import content_digest
from dataplane.errors import DatasetError
from dataplane.formats.caches import Caches
from dataplane.formats.media_paths import MediaFolders, RefusedPathError
from dataplane.formats.media_values import Found
from dataplane.formats.shard import MAX_MEDIUM_BYTES, Flaw, Medium, extension_of
from dataplane.media import MEDIA_FORMATS, MediaKind, kind_of

HEAD_BYTES = 16
"""What is looked at of media whose names promise nothing."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A medium of a row, or why there is none."""

    part: str
    nbytes: int = 0
    digest: str = ""
    file: RangeFile | None = None
    """What workers can read; None where only the node can read the bytes, out of the row."""
    offset: int = 0
    is_path: bool = False
    """Whether the row names the file; what is there may change though the row does not."""
    reason: str = ""
    kind: MediaKind = "image"

    @property
    def formats(self) -> tuple[str, ...]:
        """What a file's name promises; the path beside bytes in a table promises nothing."""
        return MEDIA_FORMATS.get(extension_of(self.file.path), ()) if self.file and self.is_path else ()


def name_cell(found: Found, folders: MediaFolders, caches: Caches) -> Cell:
    """The digest of one medium; its bytes are read for that where they were not before."""
    if found.reason is not None:
        return Cell(found.part, reason=found.reason)
    if found.data is not None:
        problem = _size_problem(len(found.data))
        return Cell(found.part, reason=problem) if problem else _cell_of_bytes(found.part, found.data)
    assert found.path is not None
    try:
        file = folders.find(found.path)
        problem = _size_problem(file.nbytes)
        return Cell(found.part, reason=f"{found.path!r}: {problem}") if problem else _cell_of_file(found, file, caches)
    except (RefusedPathError, DatasetError) as error:
        return Cell(found.part, reason=str(error))


def media_and_flaws(row: int, key: str, cells: Sequence[Cell]) -> tuple[tuple[Medium, ...], tuple[Flaw, ...]]:
    """The cells of a row, sorted into what is served and what is not."""
    media = tuple(Medium(row, cell.part, cell.nbytes, cell.digest, cell.kind) for cell in cells if not cell.reason)
    flaws = tuple(Flaw(row, f"{key} {cell.part}", cell.reason) for cell in cells if cell.reason)
    return media, flaws


def _size_problem(nbytes: int) -> str:
    if not nbytes:
        return "empty: 0 bytes"
    return f"{nbytes} encoded bytes; wanted at most {MAX_MEDIUM_BYTES}" if nbytes > MAX_MEDIUM_BYTES else ""


def _cell_of_bytes(part: str, data: bytes | memoryview) -> Cell:
    return Cell(part, len(data), content_digest(data), kind=kind_of((), bytes(data[:HEAD_BYTES])))


def _cell_of_file(found: Found, file: RangeFile, caches: Caches) -> Cell:
    digest = caches.file_digests.get(file)
    if digest is None:
        data = file.read(0, file.nbytes)
        if len(data) != file.nbytes:
            return Cell(
                found.part, reason=f"{found.path!r} has {len(data)} of {file.nbytes} bytes: it is being written"
            )
        digest = content_digest(data)
        caches.file_digests.put(file, digest)
    cell = Cell(found.part, file.nbytes, digest, file, is_path=True)
    return replace(cell, kind=kind_of(cell.formats, b"" if cell.formats else file.read(0, HEAD_BYTES)))
