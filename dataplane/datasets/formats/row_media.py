"""Gives the media of a row their digests. Tables and JSON lines share this code."""

from collections.abc import Sequence
from dataclasses import replace

from dataplane.core.digests import content_digest
from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.caches import Caches
from dataplane.datasets.formats.media_cell import Cell
from dataplane.datasets.formats.media_paths import MediaFolders, RefusedPathError
from dataplane.datasets.formats.media_values import MediaValue
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import MAX_MEDIUM_BYTES, Flaw, Medium
from dataplane.media.kinds import kind_of

HEAD_BYTES = 16
"""The number of bytes that are read to guess the kind of a medium whose name promises nothing."""


def name_cell(found: MediaValue, row_file: RangeFile, folders: MediaFolders, caches: Caches) -> Cell:
    """Return one medium of a row of `row_file` with its digest. Its bytes are read for the digest, unless they were
    read before."""
    if found.reason is not None:
        return Cell(found.part, reason=found.reason)
    if found.place is not None:
        return _cell_at(found.part, row_file, *found.place, caches)
    if found.data is not None:
        problem = _size_problem(len(found.data))
        return Cell(found.part, reason=problem) if problem else _cell_of_bytes(found.part, found.data, caches)
    assert found.path is not None
    try:
        file = folders.find(found.path)
        problem = _size_problem(file.nbytes)
        return Cell(found.part, reason=f"{found.path!r}: {problem}") if problem else _cell_of_file(found, file, caches)
    except (RefusedPathError, DatasetError) as error:
        return Cell(found.part, reason=str(error))


def media_and_flaws(row: int, key: str, cells: Sequence[Cell]) -> tuple[tuple[Medium, ...], tuple[Flaw, ...]]:
    """Return the cells of a row in two parts: media that can be served, and flaws."""
    media = tuple(Medium(row, cell.part, cell.nbytes, cell.digest, cell.kind) for cell in cells if not cell.reason)
    flaws = tuple(Flaw(row, f"{key} {cell.part}", cell.reason) for cell in cells if cell.reason)
    return media, flaws


def _size_problem(nbytes: int) -> str:
    if not nbytes:
        return "empty: 0 bytes"
    return f"{nbytes} encoded bytes; wanted at most {MAX_MEDIUM_BYTES}" if nbytes > MAX_MEDIUM_BYTES else ""


def _cell_of_bytes(part: str, data: bytes | memoryview, caches: Caches) -> Cell:
    digest = content_digest(data)
    caches.encoded.put(digest, bytes(data), len(data))
    return Cell(part, len(data), digest, kind=kind_of((), bytes(data[:HEAD_BYTES])))


def _cell_at(part: str, file: RangeFile, offset: int, nbytes: int, caches: Caches) -> Cell:
    problem = _size_problem(nbytes)
    if problem:
        return Cell(part, reason=problem)
    try:
        data = file.read(offset, nbytes)
    except DatasetError as error:
        return Cell(part, reason=str(error))
    if len(data) != nbytes:
        return Cell(part, reason=f"{file.path} ends at {offset + len(data)}: it was cut while it was read")
    return replace(_cell_of_bytes(part, data, caches), file=file, offset=offset)


def _cell_of_file(found: MediaValue, file: RangeFile, caches: Caches) -> Cell:
    digest = caches.file_digests.get(file)
    if digest is None:
        data = file.read(0, file.nbytes)
        if len(data) != file.nbytes:
            return Cell(
                found.part, reason=f"{found.path!r} has {len(data)} of {file.nbytes} bytes: it is being written"
            )
        digest = content_digest(data)
        caches.file_digests.put(file, digest)
        caches.encoded.put(digest, data, len(data))
    cell = Cell(found.part, file.nbytes, digest, file, is_path=True)
    return replace(cell, kind=kind_of(cell.formats, b"" if cell.formats else file.read(0, HEAD_BYTES)))
