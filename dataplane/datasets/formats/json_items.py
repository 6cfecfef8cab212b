"""Where the items of a JSON file begin and end: the lines of JSON lines, or the elements of one JSON array.

Nothing but places is kept: an item is parsed when a call reads its sample. A parser finds the places and sends them to
the node as arrays.
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.parser import Reply, json_of, wrong_reply
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import MAX_FIELDS_BYTES

SCAN_BYTES = 4 << 20
SPACE = b" \t\r\n"
SPACES = np.frombuffer(SPACE, np.uint8)
MARK = b"\xef\xbb\xbf"
"""The mark of UTF-8 with which some programs begin a file."""
Places = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class JsonItems:
    """The places of the items of one file."""

    starts: Places
    """[num_items] the offset of the first byte of each item."""
    ends: Places
    """[num_items] the offset behind its last byte, which may be a line break."""
    numbers: Places
    """[num_items] the number of its line, or of the element, from 1."""
    noun: str
    """What an item is called in messages: `line`, or `element`."""


def find_items(file: RangeFile) -> JsonItems:
    """Return the items of a file: the elements of the array if it holds one, otherwise the lines that are not empty.

    Raises DatasetError if the array is damaged, or the file becomes shorter meanwhile.
    """
    head = file.read(0, SCAN_BYTES)
    begin = len(MARK) if head.startswith(MARK) else 0
    is_array = head[begin:].lstrip(SPACE).startswith(b"[")
    return _find_elements(file, begin) if is_array else _find_lines(file, begin)


def reply_of(items: JsonItems) -> Reply:
    """Return the items as a parser sends them. Items without gaps between them are sent as the start of each and the
    end of the last."""
    starts, ends = np.asarray(items.starts, np.int64), np.asarray(items.ends, np.int64)
    has_gaps, has_numbers = not np.array_equal(starts[1:], ends[:-1]), not isinstance(items.numbers, range)
    arrays = [starts, ends] if has_gaps else [np.concatenate([starts, ends[-1:]])]
    arrays += [np.asarray(items.numbers, np.int64)] if has_numbers else []
    head = {"noun": items.noun, "has_gaps": has_gaps, "has_numbers": has_numbers}
    return Reply.of(head, [array.view(np.uint8).data for array in arrays])


def items_of(file: RangeFile, reply: Reply) -> JsonItems:
    """Return the items that a parser sent. Raises DatasetError if they are not places in the file, in order."""
    head = json_of(file, reply)
    try:
        arrays = [np.frombuffer(buffer, np.int64) for buffer in reply.buffers]
        numbers = arrays.pop() if head["has_numbers"] else None
        starts, ends = arrays if head["has_gaps"] else (arrays[0][:-1], arrays[0][1:])
        noun = {"line": "line", "element": "element"}[head["noun"]]
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise wrong_reply(file, f"places: {error}") from error
    is_right = len(starts) == len(ends) and (numbers is None or len(numbers) == len(starts))
    if not is_right or (len(starts) and (starts.min() < 0 or ends.max() > file.nbytes or np.any(starts > ends))):
        raise wrong_reply(file, "places out of the file")
    return JsonItems(starts, ends, range(1, len(starts) + 1) if numbers is None else numbers, noun)


def _find_lines(file: RangeFile, begin: int) -> JsonItems:
    bounds, empty, undecided = array("q", [begin]), array("q"), array("q")
    at, begins_line = begin, True
    while at < file.nbytes:
        block = _block(file, at)
        chars = np.frombuffer(block, np.uint8)
        behind = np.flatnonzero(chars == ord("\n")) + 1
        bounds.frombytes((behind + at).tobytes())
        firsts = behind[behind < len(block)]
        if begins_line:
            firsts = np.concatenate([[0], firsts])
        for first in firsts[np.isin(chars[firsts], SPACES)].tolist():
            end = block.find(b"\n", first)
            if end < 0:
                undecided.append(at + first)
            elif not block[first:end].strip():
                empty.append(at + first)
        begins_line = block.endswith(b"\n")
        at += len(block)
    if bounds[-1] < file.nbytes:
        bounds.append(file.nbytes)
    starts, ends = np.frombuffer(bounds, np.int64)[:-1], np.frombuffer(bounds, np.int64)[1:]
    for start in undecided:
        if _is_empty(file, start, int(ends[np.searchsorted(starts, start)])):
            empty.append(start)
    if not empty:
        return JsonItems(starts, ends, range(1, len(starts) + 1), "line")
    kept = np.delete(np.arange(len(starts)), np.searchsorted(starts, empty))
    return JsonItems(starts[kept], ends[kept], kept + 1, "line")


def _is_empty(file: RangeFile, start: int, end: int) -> bool:
    """Return True if a line has nothing but white space. It may be longer than a block."""
    return not any(file.read(at, min(SCAN_BYTES, end - at)).strip() for at in range(start, end, SCAN_BYTES))


def _find_elements(file: RangeFile, begin: int) -> JsonItems:
    scan = _ArrayScan(file, begin)
    starts, ends = array("q"), array("q")
    scan.take(b"[")
    while scan.next_byte() != b"]":
        if starts:
            scan.take(b",")
        start, end = scan.take_value()
        starts.append(start)
        ends.append(end)
    scan.take(b"]")
    scan.check_end()
    return JsonItems(starts, ends, range(1, len(starts) + 1), "element")


class _ArrayScan:
    """Reads the values of a JSON array one after another, a block of the file at a time.

    A block is read as Latin-1, so that a character is a byte. What JSON is made of is ASCII, and a value's place does
    not depend on what its texts mean.
    """

    def __init__(self, file: RangeFile, begin: int) -> None:
        self._file = file
        self._text = ""
        self._begin = begin
        """The offset of the first character of the text."""
        self._at = 0
        """The place in the text."""
        self._decoder = json.JSONDecoder(strict=False)

    def next_byte(self) -> bytes:
        """Return the next byte that is no white space, without passing it."""
        if found := self._skip_space():
            return found
        raise DatasetError(f"{self._file.path} ends inside its JSON array: torn, or still being written")

    def check_end(self) -> None:
        """Raises DatasetError unless only white space is left."""
        if found := self._skip_space():
            raise self._damaged(f"{found!r} follows the array")

    def _skip_space(self) -> bytes:
        """Pass white space, and return the next byte without passing it; nothing at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at].encode("latin-1")
            if not self._read_on():
                return b""

    def take(self, wanted: bytes) -> None:
        """Pass one byte. Raises DatasetError if it is another one."""
        if (found := self.next_byte()) != wanted:
            raise self._damaged(f"{found!r} stands where {wanted!r} is wanted")
        self._at += 1

    def take_value(self) -> tuple[int, int]:
        """Pass one value, and return the offsets of its begin and its end."""
        self.next_byte()
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise self._damaged("values inside each other too deeply") from error
            except ValueError as error:
                is_long = len(self._text) - self._at > MAX_FIELDS_BYTES
                if not is_long and self._read_on():
                    continue
                what = (
                    f"no element of at most {MAX_FIELDS_BYTES} bytes begins there ({error})" if is_long else str(error)
                )
                raise self._damaged(what) from error
            if end == len(self._text) and self._read_on():
                continue  # a number may go on in the next block
            start, self._at = self._at, end
            return self._begin + start, self._begin + end

    def _read_on(self) -> bool:
        """Add the next block to what is left of the text. Return False at the end of the file.

        A value that is longer than a block is read again with twice as much each time.
        """
        left = self._text[self._at :]
        offset = self._begin + len(self._text)
        if offset >= self._file.nbytes:
            return False
        block = _block(self._file, offset, max(SCAN_BYTES, len(left)))
        self._begin += self._at
        self._text, self._at = left + block.decode("latin-1"), 0
        return True

    def _damaged(self, what: str) -> DatasetError:
        place = self._begin + self._at
        return DatasetError(
            f"{self._file.path} begins as a JSON array, but at byte {place} it cannot be read: {what}; repair it, or "
            "write one object a line"
        )


def _block(file: RangeFile, at: int, nbytes: int = SCAN_BYTES) -> bytes:
    block = file.read(at, nbytes)
    if not block:
        raise DatasetError(f"{file.path} ended at {at} of {file.nbytes} bytes while it was indexed; ingest it again")
    return block
