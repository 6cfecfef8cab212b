"""`Writer`: make arrays directly in a node's shared memory. Workers that produce objects use it on the node's machine.

The arena is mapped writable once. An array is allocated in the arena, filled, and sealed without a copy and without a
hash (its version is random). If the process dies, the node frees the arrays that were not sealed; a process that stands
still keeps them. On other machines use `Client.put`.
"""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import pyarrow.flight as fl

from dataplane.client.connect import Credentials
from dataplane.client.current_session import CurrentSession
from dataplane.client.inplace_stream import InplaceStream
from dataplane.client.node_session import NodeSession
from dataplane.client.retry import NodeRetry
from dataplane.core.arena_mapping import map_arena, revoke
from dataplane.core.arrays import ITEM_BYTES, check_array
from dataplane.core.errors import NodeUnavailableError, SessionLostError
from dataplane.core.json_body import check_plain_name
from dataplane.core.refs import ArraySpec, Ref


@dataclass(slots=True)
class WritableArray:
    """An array in the arena that a worker fills inside the `with` block, and the ref of the sealed object after the
    block."""

    array: np.ndarray
    """The array to fill. Write into it only inside the block: afterwards the object is sealed and all readers may use
    it."""
    ref: Ref | None = None
    """The ref of the object; None until the object is sealed."""


class _WriterSession:
    """The session of a writer with its node, and the arena as this process maps it, writable."""

    def __init__(self, uri: str, timeout_s: float, credentials: Credentials | None, open_s: float) -> None:
        """Open a session within `open_s` seconds. Raises NodeUnavailableError if the arena cannot be mapped from
        here."""
        self.node = NodeSession(uri, "writer", timeout_s, credentials, open_s)
        try:
            if not self.node.is_present:
                raise NodeUnavailableError(
                    f"the memory of the node at {uri} cannot be reached from here, or the node runs on another "
                    "machine; use Client.put"
                )
            mapping = map_arena(self.node.hello["segments"][0], is_writable=True)
        except OSError as error:
            self.node.close()
            if isinstance(error, NodeUnavailableError):
                raise
            raise NodeUnavailableError(
                f"the memory of the node at {uri} cannot be reached from here ({error}); use Client.put"
            ) from error
        self.node.on_same_node_lost = lambda: revoke(mapping)
        self.arena = np.asarray(mapping)
        """The arena as a writable flat uint8 array. Arrays over it keep it mapped."""


class Writer:
    """Makes plain objects in the memory of the node at `uri`. It is thread-safe, but does not survive a fork."""

    def __init__(self, uri: str, *, timeout_s: float = 60.0, credentials: Credentials | None = None) -> None:
        self.uri = uri
        self.timeout_s = timeout_s
        self._current = CurrentSession(uri, partial(_WriterSession, uri, timeout_s, credentials))
        self._retry = NodeRetry(uri)
        self._lock = threading.Lock()
        self._idle: list[InplaceStream] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def create(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        *,
        scope: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Iterator[WritableArray]:
        """Give an allocated array to the `with` block. Seal the array at the end of the block, or free it if the block
        raises.

        The call waits up to `timeout_s` for free memory, and then raises OutOfSpaceError with the sizes. Raises
        NodeUnavailableError if the node's memory cannot be reached from here, or the node went away before the array
        was sealed.
        """
        spec = ArraySpec(name=name, dtype=dtype, shape=tuple(shape), meta=dict(meta or {}))
        with self.create_many([spec], scope=scope) as places:
            yield places[0]

    @contextmanager
    def create_many(self, specs: Sequence[ArraySpec], *, scope: str | None = None) -> Iterator[list[WritableArray]]:
        """Do the same as `create` for many arrays, in the order of `specs`: one round trip allocates them and one seals
        them."""
        sizes = [math.prod(spec.shape) * ITEM_BYTES.get(spec.dtype, 0) for spec in specs]
        for spec, nbytes in zip(specs, sizes, strict=True):
            check_array(check_dtype(spec.dtype), spec.shape, nbytes)
            check_plain_name(spec.name)
        if not specs:
            yield []
            return
        stream, places = self._retry.call("create", lambda s: self._allocate(specs, sizes, scope, s), self.timeout_s)
        try:
            yield places
            self._seal(stream, specs, places)
        except BaseException:
            for place in places:
                place.array.flags.writeable = False
            stream.close()  # which frees the slabs
            raise
        with self._lock:
            self._idle.append(stream)

    def close(self) -> None:
        """End the streams; the node frees slabs that are not sealed. Arrays keep their memory mapped."""
        with self._lock:
            streams, self._idle = self._idle, []
        for stream in streams:
            stream.close()
        self._current.close()

    def _allocate(
        self, specs: Sequence[ArraySpec], sizes: Sequence[int], scope: str | None, left_s: float
    ) -> tuple[InplaceStream, list[WritableArray]]:
        """Allocate the arrays; return the stream that owns their slabs, and the arrays."""
        deadline = time.monotonic() + left_s
        session = self._current.get(left_s)
        try:
            stream = self._idle_stream(session) or InplaceStream(session.node, deadline)
        except SessionLostError:
            session.node.lose()
            raise
        try:
            offsets = stream.allocate(sizes, scope, deadline)
            parts = [session.arena[at : at + nbytes] for at, nbytes in zip(offsets, sizes, strict=True)]
            return stream, [
                WritableArray(part.view(spec.dtype).reshape(spec.shape))
                for part, spec in zip(parts, specs, strict=True)
            ]
        except BaseException:
            stream.close()
            raise

    def _seal(self, stream: InplaceStream, specs: Sequence[ArraySpec], places: Sequence[WritableArray]) -> None:
        """Seal the arrays: make them read-only and set the refs in `places`."""
        bodies = [
            {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "meta": dict(spec.meta), "hash": False}
            for spec in specs
        ]
        deadline = time.monotonic() + self.timeout_s
        with self._errors_of_seal():
            refs = stream.seal(bodies, deadline)
        for place, ref in zip(places, refs, strict=True):
            place.array.flags.writeable = False
            place.ref = ref

    @contextmanager
    def _errors_of_seal(self) -> Iterator[None]:
        """Raise NodeUnavailableError if sealing fails inside the block: the array is lost with its node, so there is no
        retry."""
        try:
            yield
        except fl.FlightError as error:
            raise NodeUnavailableError(
                f"{self.uri} went away before the arrays were sealed ({str(error)[:100]}); write them again"
            ) from error

    def _idle_stream(self, session: _WriterSession) -> InplaceStream | None:
        """Return an open stream of a session that no thread uses; None if there is none. Close those of earlier
        sessions."""
        while True:
            with self._lock:
                stream = self._idle.pop() if self._idle else None
            if stream is None or (stream.session is session.node and stream.is_open):
                return stream
            stream.close()


def check_dtype(dtype: str) -> str:
    """Return `dtype` if objects may have it. Raises BadRequestError if not."""
    check_array(dtype, (0,), 0)
    return dtype
