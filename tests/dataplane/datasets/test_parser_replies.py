"""Tests of what a node accepts from a parser: a process that a file took over may send anything."""

import json
import math
import socket
import struct
from typing import Any

import numpy as np
import pytest

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.json_items import items_of
from dataplane.datasets.formats.json_safe import fields_json
from dataplane.datasets.formats.media_values import MediaValue
from dataplane.datasets.formats.parsed_rows import MAX_ROW_MEDIA, ParsedRow, replies_of, rows_of
from dataplane.datasets.formats.parser import Reply
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.tar_members import ARRAYS, KINDS, index_of
from dataplane.datasets.parsing.frames import FrameError, FrameSocket, Kind, OverdueError

FILE = RangeFile("/data/a", 1000)
WRONG = "/data/a: its parser gave an answer that cannot be right"


def numbers(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


ITEMS = {"noun": "line", "has_gaps": False, "has_numbers": False}


@pytest.mark.parametrize(
    ("head", "buffers"),
    [
        (ITEMS, [numbers(0, 10, 1001)]),
        (ITEMS, [numbers(0, 10, 5)]),
        (ITEMS, [numbers(-1, 10)]),
        (ITEMS, [b"1234567"]),
        (ITEMS, []),
        (ITEMS | {"noun": "x" * 1000}, [numbers(0, 10)]),
        (ITEMS | {"has_gaps": True}, [numbers(0, 10), numbers(5)]),
        (ITEMS | {"has_numbers": True}, [numbers(0, 10, 20), numbers(1)]),
        ([], [numbers(0, 10)]),
    ],
)
def test_places_that_are_not_in_the_file_are_refused(head: Any, buffers: list[bytes]) -> None:
    assert len(items_of(FILE, Reply.of(ITEMS, [numbers(0, 10, 1000)])).starts) == 2
    with pytest.raises(DatasetError, match=WRONG):
        items_of(FILE, Reply.of(head, buffers))


INDEX = {
    "offsets": numbers(512, 600),
    "sizes": numbers(10, 400),
    "paths": b"a.pngb.png",
    "path_ends": numbers(5, 10),
    "starts": numbers(0, 1, 2),
}


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": numbers(600, 512)},
        {"offsets": numbers(512)},
        {"sizes": numbers(10, 401)},
        {"sizes": numbers(-600, 10)},
        {"path_ends": numbers(5, 11)},
        {"path_ends": numbers(5, 4)},
        {"starts": numbers(0, 1, 1)},
        {"starts": numbers(1, 2)},
        {"starts": numbers(0, 1)},
        {"starts": b""},
        {"starts": b"123"},
    ],
)
def test_members_that_are_not_in_the_tar_are_refused(change: dict[str, bytes]) -> None:
    assert index_of(FILE, Reply.of([], list(INDEX.values()))).num_samples == 2
    assert tuple(INDEX) == ARRAYS == tuple(KINDS)
    with pytest.raises(DatasetError, match=WRONG):
        index_of(FILE, Reply.of([], list((INDEX | change).values())))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 100_000,
        "[1]",
        "[[]]",
        '[[1, [], "", false, []]]',
        '[["1", {}, "", false, []]]',
        '[[1, {}, "", false, [["images/0", "data", 1]]]]',
        '[[1, {}, "", false, [["images/0", "data", -2]]]]',
        '[[1, {}, "", false, [["images/0", "place", [990, 11]]]]]',
        '[[1, {}, "", false, [["images/0", "place", [-1, 11]]]]]',
        '[[1, {}, "", false, [["images/0", "place", [5, -3]]]]]',
        '[[1, {}, "", false, [["images/0", "place"]]]]',
    ],
)
def test_rows_that_no_parser_sends_are_refused(text: str) -> None:
    good = rows_of(
        FILE, Reply(b'[[1, {"a": 1}, "", false, [["images/0", "data", 0], ["b/0", "place", [1, 9]]]]]', [b"x"])
    )
    assert good[0][1].media == (MediaValue("images/0", data=b"x"), MediaValue("b/0", place=(1, 9)))
    with pytest.raises(DatasetError, match=WRONG):
        rows_of(FILE, Reply(text.encode(), [b"x"]))


def test_a_row_with_too_many_media_or_values_is_refused_where_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ParsedRow(media=[MediaValue("images/0", path="a")] * (MAX_ROW_MEDIA + 1))
    ((_, found),) = rows_of(FILE, next(replies_of([(0, row)])))
    assert (found.is_lost, found.media, f"wanted at most {MAX_ROW_MEDIA}" in found.reason) == (True, (), True)
    monkeypatch.setattr("dataplane.datasets.formats.json_safe.MAX_FIELDS_BYTES", 8000)
    assert fields_json({"a": [[]] * 900}) == (json.dumps({"a": [[]] * 900}, separators=(",", ":")), "")
    assert "wanted at most 8000" in fields_json({"a": [[]] * 1100})[1]
    assert fields_json({"a": math.nan, "b": (1, None)}) == ('{"a":null,"b":[1,null]}', "")


def test_frames_of_any_size_arrive_and_those_that_are_too_large_or_late_do_not() -> None:
    ours, theirs = map(FrameSocket, socket.socketpair())
    try:
        for buffers in ([], [b"a", b""], [b"b" * 5000] * 3, [b"c" * 70_000], [b"d"] * 40):
            theirs.send(Kind.REPLY, b"head", buffers, timeout_s=60)
            theirs.send(Kind.LAST, b"next")
            frames = [ours.receive(1 << 20, 60) for _ in range(2)]
            assert [(frame.kind, frame.head, list(frame.buffers)) for frame in frames] == [
                (Kind.REPLY, b"head", buffers),
                (Kind.LAST, b"next", []),
            ]
        with pytest.raises(OverdueError):
            ours.receive(0, 0.05)
        theirs.send(Kind.REPLY, b"", [b"x" * 11])
        with pytest.raises(FrameError, match="11 bytes; wanted at most 10"):
            ours.receive(10, 60)
        with pytest.raises(OverdueError):
            theirs.send(Kind.REPLY, b"", [b"x" * (8 << 20)], timeout_s=0.2)
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize(
    "prefix", [struct.pack("<BQI", 3, 1 << 40, 0), struct.pack("<BQI", 3, 0, 1 << 31), struct.pack("<BQI", 77, 0, 0)]
)
def test_what_is_no_frame_is_refused_before_memory_is_taken_for_it(prefix: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(prefix)
        with pytest.raises(FrameError):
            FrameSocket(ours).receive(10, 60)


def test_a_stream_that_ends_is_no_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"\3")
        theirs.close()
        with pytest.raises(EOFError):
            FrameSocket(ours).receive(10, 60)
