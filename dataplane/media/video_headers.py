"""Reads the frame size of a video from its container's headers, so that a decompression bomb is refused before
decoding.

Only the size of coded frames counts, not the display size. A codec's own header may still say something else; the
worker's memory limit covers that case. An MP4 file whose `moov` is compressed is not read.
"""

from collections.abc import Callable, Hashable, Iterator
from itertools import islice

from dataplane.media.containers import matroska_element, mp4_boxes

Walk = Callable[[bytes, int, int], Iterator[tuple[Hashable, int, int]]]
"""A function that yields the kind, start and end of the content of each element between two offsets."""

_VIDEO_PATH = (0x18538067, 0x1654AE6B, 0xAE, 0xE0)  # Segment, Tracks, TrackEntry, Video
_WIDTH, _HEIGHT = 0xB0, 0xBA
_MAX_ELEMENTS = 100_000
"""The maximum number of elements of one level: enough for the fragments of hours of video, and a limit for a file that
is made of headers only."""
_AVI_HEADER_BYTES = 1 << 16


def largest_frame(data: bytes, container: str) -> tuple[int, int]:
    """Return the width and height of the largest frames that any video track announces; (0, 0) if no track announces a
    size."""
    if container in ("MP4", "MOV"):
        sizes = _mp4_sizes(data)
    else:
        sizes = _avi_sizes(data) if container == "AVI" else _matroska_sizes(data)
    return max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))


def _mp4_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the sizes in the sample descriptions of every track that is a video, or whose kind is not given."""
    for media in _find(data, _boxes, (b"moov", b"trak", b"mdia"), 0, len(data)):
        handlers = [data[start + 8 : start + 12] for start, _ in _find(data, _boxes, (b"hdlr",), *media)]
        if handlers and b"vide" not in handlers:
            continue
        for start, end in _find(data, _boxes, (b"minf", b"stbl", b"stsd"), *media):
            for _, entry, entry_end in _boxes(data, start + 8, end):
                if entry_end - entry >= 28:
                    yield int.from_bytes(data[entry + 24 : entry + 26]), int.from_bytes(data[entry + 26 : entry + 28])


def _matroska_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    for video in _find(data, _elements, _VIDEO_PATH, 0, len(data)):
        widths, heights = (
            [int.from_bytes(data[start:end]) for start, end in _find(data, _elements, (kind,), *video)]
            for kind in (_WIDTH, _HEIGHT)
        )
        yield max(widths, default=0), max(heights, default=0)


def _avi_sizes(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the size in the main header, and in the bitmap header of each video stream. A negative height means that
    rows are stored from bottom to top."""
    head = data[:_AVI_HEADER_BYTES]
    main = head.find(b"avih")
    if main >= 0:
        yield _int32(head, main + 40), _int32(head, main + 44)
    stream = head.find(b"vids")
    while stream >= 0:
        bitmap = head.find(b"strf", stream)
        if bitmap >= 0:
            yield _int32(head, bitmap + 12), _int32(head, bitmap + 16)
        stream = head.find(b"vids", stream + 4)


def _int32(data: bytes, at: int) -> int:
    return abs(int.from_bytes(data[at : at + 4], "little", signed=True))


def _find(data: bytes, walk: Walk, path: tuple[Hashable, ...], at: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of the content of every element to which a path of kinds leads."""
    for kind, start, element_end in islice(walk(data, at, end), _MAX_ELEMENTS):
        if kind == path[0] and len(path) == 1:
            yield start, element_end
        elif kind == path[0]:
            yield from _find(data, walk, path[1:], start, element_end)


def _boxes(data: bytes, at: int, end: int) -> Iterator[tuple[Hashable, int, int]]:
    for kind, start, box_end in mp4_boxes(data, at, end):
        yield kind, start + (16 if data[start : start + 4] == b"\0\0\0\1" else 8), min(box_end, end)


def _elements(data: bytes, at: int, end: int) -> Iterator[tuple[Hashable, int, int]]:
    while at < end and (element := matroska_element(data, at)) is not None:
        kind, start, known_end = element
        at = end if known_end is None else min(known_end, end)
        yield kind, start, at
