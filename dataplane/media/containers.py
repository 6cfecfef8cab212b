"""Checks a video's container from its outermost elements alone: which format it has, and whether it is complete.

A demuxer gets only bytes that pass this check. Without it, a demuxer would accept playlists that name other files and
addresses, and would read a WebM that was cut short as a shorter video, or crash: decord does on an AVI that was
cut short. Nothing inside the tracks is checked here.
"""

from collections.abc import Iterator

from dataplane.media.kinds import UndecodableError

_MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_EBML, _DOC_TYPE, _SEGMENT = 0x1A45DFA3, 0x4282, 0x18538067


def check_container(data: bytes) -> str:
    """Return the format of a video's container: MP4, MOV, WEBM, MKV or AVI. Raises UndecodableError for any other
    container, and for one that is cut short."""
    if not data:
        raise UndecodableError("empty: 0 bytes")
    if data[4:8] in _MP4_BOXES:
        return _check_mp4(data)
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return _check_matroska(data)
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return _check_avi(data)
    raise UndecodableError(f"not a video of a known container ({len(data)} bytes, first {data[:8]!r})")


def _check_mp4(data: bytes) -> str:
    kinds = set()
    for kind, start, end in mp4_boxes(data, 0, len(data)):
        if end > len(data) and kind in (b"ftyp", b"moov", b"mdat", b"moof"):
            raise _torn(kind.decode(), start, end, data)
        kinds.add(kind)
    if b"moov" not in kinds:
        raise UndecodableError("truncated MP4: it has no moov box, which says where the frames are")
    return "MOV" if data[4:8] != b"ftyp" or data[8:12] == b"qt  " else "MP4"


def mp4_boxes(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of every box between two offsets. Stop at bytes that are not a box (some files end in
    padding)."""
    while at + 8 <= end:
        nbytes, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if nbytes == 0:
            nbytes = end - at
        elif nbytes == 1:
            nbytes = int.from_bytes(data[at + 8 : at + 16], "big")
        if nbytes < 8:
            return
        yield kind, at, at + nbytes
        at += nbytes


def _check_matroska(data: bytes) -> str:
    header = matroska_element(data, 0)
    if header is None or header[0] != _EBML or header[2] is None or header[2] > len(data):
        raise UndecodableError(f"truncated or corrupt Matroska header ({len(data)} bytes)")
    doc_type = b""
    at = header[1]
    while at < header[2] and (inner := matroska_element(data, at)) is not None and inner[2] is not None:
        if inner[0] == _DOC_TYPE:
            doc_type = data[inner[1] : inner[2]].rstrip(b"\0")
        at = inner[2]
    segment = matroska_element(data, header[2])
    if segment is None or segment[0] != _SEGMENT:
        raise UndecodableError("truncated Matroska: nothing follows its header")
    if segment[2] is not None and segment[2] > len(data):
        raise _torn("segment", segment[1], segment[2], data)
    return "WEBM" if doc_type == b"webm" else "MKV"


def matroska_element(data: bytes, at: int) -> tuple[int, int, int | None] | None:
    """Return the id, start and end of an EBML element's content. The end is None if the writer did not know it."""
    if at >= len(data) or not data[at]:
        return None
    id_bytes = 9 - data[at].bit_length()
    size_at = at + id_bytes
    if id_bytes > 4 or size_at >= len(data) or not data[size_at]:
        return None
    size_bytes = 9 - data[size_at].bit_length()
    start = size_at + size_bytes
    nbytes = int.from_bytes(data[size_at:start], "big") & ((1 << 7 * size_bytes) - 1)
    is_unknown = nbytes == (1 << 7 * size_bytes) - 1
    return int.from_bytes(data[at:size_at], "big"), start, None if is_unknown else start + nbytes


def _check_avi(data: bytes) -> str:
    at = 0
    while data[at : at + 4] == b"RIFF":  # big files have several RIFF elements
        end = at + 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        if end > len(data):
            raise _torn("RIFF", at, end, data)
        _check_avi_lists(data, at + 12, end)
        at = end + end % 2
    return "AVI"


def _check_avi_lists(data: bytes, at: int, riff_end: int) -> None:
    """Check that the lists of a RIFF element, which hold headers and frames, end where it ends or before."""
    while at + 8 <= riff_end:
        end = at + 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"LIST" and end > riff_end:
            raise _torn(f"list {data[at + 8 : at + 12].decode(errors='replace')}", at, end, data)
        at = end + end % 2


def _torn(what: str, start: int, end: int, data: bytes) -> UndecodableError:
    return UndecodableError(f"truncated: its {what} takes bytes {start} to {end}, there are {len(data)}")
