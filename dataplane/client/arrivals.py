"""Puts the pieces of a download together: an object arrives complete and verified, or not at all.

A `Sink` gives the memory for each object, and takes those that are complete. What the sender says about an object is
compared with the ref by which it was requested.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from blake3 import blake3

from dataplane.core.digests import digest_of
from dataplane.core.errors import ChecksumError, DataPlaneError, OutOfSpaceError
from dataplane.core.flight_errors import from_body
from dataplane.core.integrity import check_digest, check_sent
from dataplane.core.json_body import parse
from dataplane.core.refs import Ref
from dataplane.core.schemas import INLINE_BYTES

Whole = tuple[int, Ref, str]
"""A complete object: its position among the requested objects, its ref, and the digest of its bytes."""


class Sink(Protocol):
    """The receiver of downloaded objects. `at` is the position of an object among the requested objects."""

    def open(self, at: int, ref: Ref, *, can_wait: bool = True) -> np.ndarray:
        """Return the memory, as a flat uint8 array, into which the bytes of an object are written. `ref` is the
        sender's ref of the object.

        Raises a DataPlaneError to refuse the object. If there is no memory, raises OutOfSpaceError; with `can_wait`,
        the method may wait for memory first.
        """

    def done(self, whole: Sequence[Whole]) -> None:
        """Accept objects whose bytes have all arrived and match their digests."""

    def discard(self, at: int) -> None:
        """Free the memory that `open` gave for an object. The download writes no more into that memory, whose content
        is invalid."""

    def failed(self, at: int, error: DataPlaneError) -> None:
        """Note that an object does not arrive, because the sender cannot send it or `open` refused it. Other objects
        still arrive."""


class Arrivals:
    """The objects of one stream, whose pieces arrive in batches of `schemas.PIECES`."""

    def __init__(self, wanted: Sequence[Ref], sink: Sink) -> None:
        self._wanted = wanted
        self._sink = sink
        self._coming: _Coming | None = None
        self._whole: list[Whole] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Store the pieces of a batch. The objects that are complete go to the sink together, because each call of the
        sink costs about as much as an object. Raises ChecksumError if the pieces do not fit the objects."""
        try:
            for at, start, info, data in _rows(batch, len(self._wanted)):
                if info:
                    self.check_whole()
                    self._coming = self._begin(at, parse(info.encode(), "the info of an object"))
                elif self._coming is None or self._coming.at != at:
                    raise ChecksumError(f"bytes of {self._wanted[at].name} came without a description of the object")
                if self._coming is not None and self._coming.add(start, data):
                    self._end(self._coming)
        finally:
            self._flush()

    def check_whole(self) -> None:
        """Raise ChecksumError if the stream ends, or begins another object, before all bytes of an object arrived."""
        if self._coming is not None:
            raise ChecksumError(
                f"{self._coming.ref.name} ended after {self._coming.received} of {self._coming.ref.nbytes} bytes"
            )

    def discard(self) -> None:
        """Free the memory of the object that is not complete."""
        if self._coming is not None and self._coming.target is not None:
            self._sink.discard(self._coming.at)

    def _begin(self, at: int, info: Mapping[str, Any]) -> "_Coming | None":
        """Begin to receive the object that `info` describes. Return None if the sender reports an error instead of
        bytes."""
        error = from_body(info)
        if error is not None:
            self._sink.failed(at, error)
            return None
        digest = str(info.get("checksum"))
        ref = check_sent(info.get("ref", self._wanted[at]), digest, self._wanted[at])
        try:
            return _Coming(at, ref, digest, self._open(at, ref))
        except DataPlaneError as refused:
            self._sink.failed(at, refused)
            return _Coming(at, ref, digest, None)

    def _open(self, at: int, ref: Ref) -> np.ndarray:
        """Return the memory for an object. If there is none, the objects that are complete are handed over before this
        waits, because their memory can be freed only then."""
        if self._whole:
            try:
                return self._sink.open(at, ref, can_wait=False)
            except OutOfSpaceError:
                self._flush()
        return self._sink.open(at, ref)

    def _end(self, coming: "_Coming") -> None:
        """Verify an object of which all bytes arrived."""
        if coming.target is not None:
            check_digest(coming.ref, digest_of(coming.hashed), coming.digest)
            self._whole.append((coming.at, coming.ref, coming.digest))
        self._coming = None

    def _flush(self) -> None:
        """Hand the complete objects over to the sink."""
        whole, self._whole = self._whole, []
        if whole:
            self._sink.done(whole)


class _Coming:
    """An object whose pieces are arriving. Its bytes are dropped if `target` is None."""

    def __init__(self, at: int, ref: Ref, digest: str, target: np.ndarray | None) -> None:
        self.at = at
        self.ref = ref
        self.digest = digest
        self.target = target
        self.received = 0
        self.hashed = blake3()

    def add(self, start: int, data: np.ndarray) -> bool:
        """Store the next bytes of the object. Return True if they were the last ones."""
        if start != self.received or start + len(data) > self.ref.nbytes:
            raise ChecksumError(
                f"bytes {start} to {start + len(data)} of {self.ref.name} came after {self.received} of "
                f"{self.ref.nbytes}; wanted them in order"
            )
        if self.target is not None:
            self.target[start : start + len(data)] = data
            self.hashed.update(self.target[start : start + len(data)].data)  # they are in the processor's cache now
        self.received += len(data)
        return self.received == self.ref.nbytes


def _rows(batch: pa.RecordBatch, num_wanted: int) -> Iterator[tuple[int, int, str, np.ndarray]]:
    """Yield (position among the requested objects, first byte, info, bytes) for each row of a batch of pieces."""
    batch.validate(full=True)
    places, starts, infos = (batch.column(column).to_pylist() for column in range(3))
    column = batch.column(3)
    _, packed, *outside = column.buffers()
    views = np.frombuffer(packed, np.int32).reshape(-1, 4)[column.offset :] if len(column) else ()
    for at, start, info, view in zip(places, starts, infos, views, strict=False):
        if not 0 <= at < num_wanted:
            raise ChecksumError(f"a stream of {num_wanted} objects brought bytes of number {at}")
        size, number, offset = int(view[0]), int(view[2]), int(view[3])
        if size <= INLINE_BYTES:
            yield at, start, info or "", view.view(np.uint8)[4 : 4 + size]
        else:
            yield at, start, info or "", np.frombuffer(outside[number], np.uint8, size, offset)
