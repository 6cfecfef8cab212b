"""`Reader`: resolve refs into read-only numpy views of a node's shared memory, without a copy. Only workers use it.

One resolve takes one round trip for any number of refs. Each view has a lease that keeps its object in place: the lease
ends when the view and all arrays and tensors made over it (slices, torch tensors) are garbage-collected, or when this
process dies. Writing into a view kills the process; copy the view first. A reader and its views do not survive a fork.
They do survive a restart of the node, and a connection that breaks while this process or the node stands still: views
keep their memory, and the reader continues with the node that is on the same address. A child that touches a view of
its parent is ended by the system.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from dataplane.client.connect import Credentials
from dataplane.client.current_session import CurrentSession
from dataplane.client.lease_session import LeaseSession, ResolveStream
from dataplane.client.retry import MIN_ATTEMPT_S, NodeRetry
from dataplane.core.errors import ChecksumError, NodeUnavailableError, SessionLostError, StreamLostError
from dataplane.core.flight_errors import from_body
from dataplane.core.integrity import check_layout, check_version
from dataplane.core.json_body import dump, parse
from dataplane.core.locators import MAX_JSON_OBJECTS, Locators
from dataplane.core.refs import Ref
from dataplane.core.shared_files import FileMapping, map_file

_TYPE_CODES = {
    name: np.dtype(name).str
    for name in ("bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32")
} | {name: np.dtype(name).str for name in ("int64", "uint64", "float64")}
"""The numpy type string (such as `<f4`) of each dtype that an object may have."""

log = logging.getLogger(__name__)


class _Owner:
    """The owner of one view's memory. numpy keeps it alive as long as any array or tensor over the view is alive. When
    it is garbage-collected, the lease of the view ends."""

    __slots__ = ("__array_interface__", "_lease", "_mapping", "_session")

    def __init__(
        self, address: int, ref: Ref, lease: int, session: LeaseSession, mapping: FileMapping | None = None
    ) -> None:
        self._mapping = mapping  # set if the object is spilled: the mapping of its file
        typestr = _TYPE_CODES[ref.dtype]
        self._lease = lease
        self._session = session  # keeps the arena mapped
        self.__array_interface__ = {
            "data": (address, True),  # True: read-only
            "shape": ref.shape,
            "typestr": typestr,
            "version": 3,
        }

    def __del__(self) -> None:
        self._session.ended.put(self._lease)  # SimpleQueue.put is reentrant and never blocks


class Reader:
    """Resolves refs at one node. It is thread-safe; asyncio code calls it through `asyncio.to_thread`."""

    def __init__(self, uri: str, *, timeout_s: float = 60.0, credentials: Credentials | None = None) -> None:
        self.uri = uri
        self.timeout_s = timeout_s
        self._pid = os.getpid()
        self._retry = NodeRetry(uri)
        self._current = CurrentSession(uri, partial(LeaseSession, uri, timeout_s, credentials))
        self._retry.call("session", self._current.get, timeout_s)
        self._lock = threading.Lock()
        self._idle: list[ResolveStream] = []
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def resolve(self, refs: Sequence[Ref]) -> list[np.ndarray]:
        """Return one read-only view per ref, 64-byte aligned, with the ref's dtype and shape.

        Objects that were evicted are first made again from their lineage. The call waits for the node, also while the
        node restarts; after `timeout_s` it raises NodeTimeoutError or NodeUnavailableError. Raises MissingObjectError
        for a plain object that is gone, and BadMediaError for a medium in quarantine.
        """
        if os.getpid() != self._pid:
            raise NodeUnavailableError(f"this reader was made in process {self._pid}; make one after the fork")
        if not refs:
            return []
        return self._retry.call("resolve", lambda left_s: self._resolve(refs, left_s), self.timeout_s)

    def mapping(self) -> FileMapping | None:
        """Return the segment as this process maps it now; None if objects are copied over Flight instead."""
        session = self._current.last
        return None if session is None else session.arena

    def close(self) -> None:
        """Close the connection. Views stay valid: their leases end when they are garbage-collected."""
        with self._lock:
            self._is_closed = True
            streams, self._idle = self._idle, []
        for stream in streams:
            stream.close()
        self._current.close()

    def _resolve(self, refs: Sequence[Ref], timeout_s: float) -> list[np.ndarray]:
        """Resolve once, over a stream or with copies, and return one array per ref. Mark the session as lost if the
        node does not know it."""
        deadline = time.monotonic() + timeout_s
        session = self._current.get(timeout_s)
        session.node.begin()
        try:
            if session.arena is None:
                return session.fetch(refs, deadline)
            with self._stream(session) as stream:
                return self._resolve_over(stream, refs, deadline)
        except SessionLostError:
            session.node.lose()
            raise
        finally:
            session.node.finish()

    @contextmanager
    def _stream(self, session: LeaseSession) -> Iterator[ResolveStream]:
        """Give a resolve stream to this thread alone during the `with` block. The stream is reused afterwards unless it
        broke."""
        stream = self._idle_stream(session) or ResolveStream(session)
        try:
            yield stream
        finally:
            with self._lock:
                ended = [stream] if stream.is_broken or self._is_closed else []
                if not ended:
                    self._idle.append(stream)
                elif not stream.is_overdue:  # the connection broke, and the other streams with it
                    ended, self._idle = [*ended, *self._idle], []
            for one in ended:
                one.close()

    def _idle_stream(self, session: LeaseSession) -> ResolveStream | None:
        """Return an open stream of a session that no thread uses; None if there is none. Close those of earlier
        sessions."""
        while True:
            with self._lock:
                stream = self._idle.pop() if self._idle else None
            if stream is None or stream.session is session:
                return stream
            stream.close()

    def _resolve_over(self, stream: ResolveStream, refs: Sequence[Ref], deadline: float) -> list[np.ndarray]:
        """Return one array per ref. Ask by names first, which is a short request; then send whole refs for the objects
        that are not resident."""
        asked = {"names": [ref.name for ref in refs]} | ({"as": "json"} if len(refs) <= MAX_JSON_OBJECTS else {})
        try:
            views = self._views(stream, refs, self._ask(stream, asked, deadline))
        except ChecksumError:
            if all(ref.node == stream.session.node_id for ref in refs):
                raise
            views = [None] * len(refs)  # perhaps old copies of another node's objects: send whole refs
        missing = [at for at, view in enumerate(views) if view is None]
        if missing:
            wanted = [refs[at] for at in missing]
            request = {"refs": [ref.to_dict() for ref in wanted], "timeout_s": _left_s(deadline)}
            try:
                made = self._views(stream, wanted, self._ask(stream, request, deadline))
            except BaseException:
                views.clear()  # the error's traceback holds this frame, which must not hold leases
                raise
            for at, view in zip(missing, made, strict=True):
                views[at] = view
        return views  # type: ignore[return-value]  # none is None any more

    def _ask(self, stream: ResolveStream, request: dict[str, Any], deadline: float) -> Locators:
        """Send one request and return the locators in the reply. Raises the error that the node sent."""
        try:
            batch, metadata = stream.ask(dump(request), _left_s(deadline))
        except pa.ArrowException as raised:
            if stream.is_overdue:
                raise fl.FlightTimedOutError("no reply") from raised
            raise
        except StopIteration:
            raise StreamLostError(f"{self.uri} ended the resolve stream; is the node running?") from None
        if batch is None:
            reply = parse(metadata, "the reply to resolve")
            if "locators" in reply:
                return Locators.from_json(reply)
            error = from_body(reply)
            raise error if error else NodeUnavailableError(f"{self.uri} answered resolve without locators")
        files = parse(metadata, "the files of a reply")["files"] if metadata is not None and metadata.size else ()
        return Locators.from_batch(batch, files)

    def _views(self, stream: ResolveStream, refs: Sequence[Ref], locators: Locators) -> list[np.ndarray | None]:
        """Return one view per object of a reply, None for an object that is not resident.

        If any object does not match its ref, the call raises ChecksumError and all leases of the reply end.
        """
        offsets, leases = locators.offset, locators.lease
        session, arena = stream.session, stream.session.arena
        assert arena is not None
        session.node.add_leases(len(offsets) - offsets.count(-1))
        owners: list[_Owner | np.ndarray | None] = []
        try:
            _check(refs, locators)
            for ref, offset, lease, segment in zip(refs, offsets, leases, locators.segment, strict=True):
                if offset < 0:
                    owners.append(None)
                elif not segment:
                    _check_inside(offset, ref, arena.nbytes)
                    owners.append(_Owner(arena.address + offset, ref, lease, session))
                else:
                    owners.append(self._open_spilled(locators.files[segment - 1], offset, ref, lease, session))
            return [None if owner is None else np.asarray(owner) for owner in owners]
        except BaseException:
            for offset, lease in list(zip(offsets, leases, strict=True))[len(owners) :]:
                if offset >= 0:
                    session.ended.put(lease)
            raise

    def _open_spilled(
        self, shared: dict[str, Any], offset: int, ref: Ref, lease: int, session: LeaseSession
    ) -> "_Owner | np.ndarray":
        """Return a mapping of the file of a spilled object; if the file cannot be opened from here, a copy of the
        object over Flight."""
        try:
            mapping = map_file(shared)
        except OSError as error:
            log.info("%s cannot be mapped (%s); %s is copied over Flight", shared["path"], error, ref.name)
            copied = session.fetch([ref], time.monotonic() + self.timeout_s)[0]
            session.ended.put(lease)
            return copied
        _check_inside(offset, ref, mapping.nbytes)
        return _Owner(mapping.address + offset, ref, lease, session, mapping)


def _left_s(deadline: float) -> float:
    """Return the seconds to the deadline, at least `MIN_ATTEMPT_S`."""
    return max(MIN_ATTEMPT_S, deadline - time.monotonic())


def _check(refs: Sequence[Ref], locators: Locators) -> None:
    """Check that each resident object has the dtype, shape, size and version of its ref. Raises ChecksumError if
    not."""
    columns = (locators.offset, locators.dtype, locators.shape, locators.nbytes, locators.version)
    for ref, offset, dtype, shape, nbytes, version in zip(refs, *columns, strict=True):
        if offset >= 0:
            check_version(ref, version)
            check_layout(ref, dtype, shape, nbytes)


def _check_inside(offset: int, ref: Ref, nbytes: int) -> None:
    """Check that a view stays inside a mapping of `nbytes` bytes. Raises NodeUnavailableError if not: such a view would
    crash this process, or show other memory of it."""
    if not 0 <= offset <= nbytes - ref.nbytes:
        raise NodeUnavailableError(
            f"a locator puts {ref.name} outside of its node's memory: it is not a data-plane node"
        )
