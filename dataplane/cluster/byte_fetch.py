"""Receiving objects over byte connections, straight into their slabs: whole and verified, or not at all.

`dataplane/client/download.py` does the same over Flight, with the same sinks. While the next part is received, another
thread hashes the part before. Parts are big, or hold many small objects, so that little Python runs between them. One
object over several connections is in `byte_fetch_ranges.py`.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from blake3 import blake3

from dataplane.client.download import Call, Sink, Whole, announced, verify
from dataplane.cluster.ahead import Ahead
from dataplane.core.byte_socket import ByteSocket
from dataplane.core.digests import content_digest, digest_of
from dataplane.core.errors import ChecksumError, DataPlaneError, OutOfSpaceError, StreamLostError
from dataplane.core.flight_errors import from_body
from dataplane.core.json_body import MAX_BODY_BYTES, take
from dataplane.core.refs import Ref

PART_BYTES = 8 << 20
"""The size of a part in bytes. A part is received in one go and hashed while the next part is received. Senders group
small objects into runs of this size."""
_PART_OBJECTS = 256
_INLINE_BELOW = 128 << 10
"""The size in bytes below which the receiving thread hashes a part itself, because waking another thread costs more."""


def receive_many(line: ByteSocket, wanted: Sequence[Ref], sink: Sink, call: Call, threads: ThreadPoolExecutor) -> None:
    """Receive all objects over one connection. If the connection breaks, raise the reason; objects that were complete
    by then stay done.

    Waits for: the sender, and for room in the sink, until the call's deadline.
    """
    line.send(call.body(refs=[ref.to_dict() for ref in wanted]))
    coming = _Coming(line, wanted, sink, call, threads)
    try:
        while (objects := next_objects(line, call)) is not None:
            coming.take(objects)
        coming.settle()
    except BaseException:
        coming.discard()
        raise


@dataclass(slots=True, eq=False)
class _Object:
    """An object whose bytes are being received."""

    at: int
    ref: Ref
    digest: str
    num_left: int
    """The number of bytes that are not hashed yet."""
    hash: blake3 | None = None
    """The hash of the bytes so far, for an object that is received in several parts."""

    def add(self, data: memoryview) -> bool:
        """Hash the next bytes. Return True if these were the object's last bytes and its digest equals the announced
        one."""
        self.num_left -= data.nbytes
        if not self.num_left and data.nbytes == self.ref.nbytes:
            verify(self.ref, content_digest(data), self.digest)
            return True
        self.hash = self.hash or blake3(max_threads=1)
        self.hash.update(data)
        if self.num_left:
            return False
        verify(self.ref, digest_of(self.hash), self.digest)
        return True


class _Coming:
    """Objects that are received in parts. This thread receives each part; another thread hashes it and hands it
    over."""

    def __init__(
        self, line: ByteSocket, wanted: Sequence[Ref], sink: Sink, call: Call, threads: ThreadPoolExecutor
    ) -> None:
        self._line = line
        self._wanted = wanted
        self._sink = sink
        self._until = call.deadline
        self._ahead = Ahead(threads)
        self._missing = set(range(len(wanted)))
        self._open: set[int] = set()
        self._part: list[tuple[_Object, memoryview]] = []
        self._part_bytes = 0

    def take(self, objects: Sequence[object]) -> None:
        """Receive the objects that a header describes."""
        for info in objects:
            self._begin(checked_info(info))
        self._receive()

    def settle(self) -> None:
        """Wait until all received objects are handed over to the sink. Raises ChecksumError if one of them has wrong
        bytes."""
        self._ahead.wait()

    def discard(self) -> None:
        """Discard the objects that are not complete, once no thread reads or writes them any more."""
        self._ahead.end()
        for at in self._open:
            self._sink.discard(at)

    def _begin(self, info: Mapping[str, Any]) -> None:
        at = take(info, "an object", "at", int)
        if at not in self._missing:
            raise ChecksumError(f"object {at} of {len(self._wanted)} came twice, or was not asked for")
        self._missing.discard(at)
        wanted, error = self._wanted[at], from_body(info)
        if error is not None:
            self._sink.failed(at, error)
            return
        ref, digest = announced_in(info, wanted)
        target = self._room_for(at, ref)
        if isinstance(target, DataPlaneError):
            # report the error first: there may be no time left to receive bytes that will be thrown away
            self._sink.failed(at, target)
            self._receive()
            self._line.drain(ref.nbytes, self._until)
            return
        self._open.add(at)
        self._add(_Object(at, ref, digest, ref.nbytes), target.data)

    def _room_for(self, at: int, ref: Ref) -> np.ndarray | DataPlaneError:
        """Return memory of the sink, or the reason why the sink has none.

        Received objects are handed over before this waits for room, because these objects may be what fills the arena.
        """
        try:
            return self._sink.open(at, ref, can_wait=False)
        except OutOfSpaceError:
            pass
        except DataPlaneError as refused:
            return refused
        self._receive()
        self._ahead.wait()
        try:
            return self._sink.open(at, ref)
        except DataPlaneError as refused:
            return refused

    def _add(self, one: _Object, target: memoryview) -> None:
        start = 0
        while True:
            piece = target[start : start + PART_BYTES - self._part_bytes]
            self._part.append((one, piece))
            self._part_bytes += piece.nbytes
            start += piece.nbytes
            if self._part_bytes >= PART_BYTES or len(self._part) >= _PART_OBJECTS:
                self._receive()
            if start >= one.ref.nbytes:
                return

    def _receive(self) -> None:
        """Receive the planned part. It is hashed while the next part is received."""
        part, nbytes = self._part, self._part_bytes
        self._part, self._part_bytes = [], 0
        if not part:
            return
        self._line.fill([piece for _, piece in part], self._until)
        if nbytes < _INLINE_BELOW:
            self._ahead.wait()
            self._hand_over(part)
        else:
            self._ahead.then(partial(self._hand_over, part))

    def _hand_over(self, part: "Sequence[tuple[_Object, memoryview]]") -> None:
        """Hash a part, and report the objects that are complete with this part."""
        whole: list[Whole] = [(one.at, one.ref, one.digest) for one, piece in part if one.add(piece)]
        self._sink.done(whole)
        self._open.difference_update(at for at, _, _ in whole)


def next_objects(line: ByteSocket, call: Call) -> Sequence[object] | None:
    """Return the objects that the next frame describes, or None after the last frame. Raises the error with which an
    answer ended."""
    header = _header(line, call)
    error = from_body(header)
    if error is not None:
        raise error
    if "end" in header:
        return None
    objects: list[object] = take(header, "a header", "objects", list)
    return objects


def _header(line: ByteSocket, call: Call) -> dict[str, Any]:
    nbytes = line.length(call.deadline + call.grace_s)
    if nbytes is None:
        raise StreamLostError("a byte connection ended, or brought nothing for too long, in the middle of an answer")
    if nbytes > MAX_BODY_BYTES:
        raise DataPlaneError(f"a header of {nbytes} bytes came; wanted at most {MAX_BODY_BYTES}")
    return line.body(nbytes, "a header", call.deadline)


def end_answer(line: ByteSocket, call: Call) -> None:
    """Read the last frame of an answer. The connection can be used again after that."""
    while (objects := next_objects(line, call)) is not None:
        if objects:
            raise ChecksumError("more objects came than were asked for")


def checked_info(info: object) -> Mapping[str, Any]:
    """Return a header's description of an object. DataPlaneError if it is not a JSON object."""
    if not isinstance(info, Mapping):
        raise DataPlaneError(f"a header describes an object as a {type(info).__name__}; wanted a JSON object")
    return info


def announced_in(info: Mapping[str, Any], wanted: Ref) -> tuple[Ref, str]:
    """Return the announced ref and digest. A sender leaves the ref out if it equals the requested one."""
    return announced(info.get("ref", wanted), str(info.get("checksum")), wanted)
