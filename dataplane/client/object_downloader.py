"""Private copies of objects for readers that cannot map their node's shared memory.

The copies are downloaded over Flight with `download.py`, verified, and read-only like views.
"""

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow.flight as fl

from dataplane.client.arrivals import Whole
from dataplane.client.connect import Credentials, connect
from dataplane.client.download import NUM_STREAMS, RANGES_FROM, Call, receive_many, receive_ranges
from dataplane.core.errors import ChecksumError, DataPlaneError
from dataplane.core.integrity import check_layout, check_version
from dataplane.core.refs import Ref

_ALIGN = 64
"""The alignment of the arrays in bytes, the same as that of views in the arena."""


class ObjectDownloader:
    """Downloads objects over separate connections, opened on first use. Thread-safe."""

    def __init__(self, uri: str, credentials: Credentials | None) -> None:
        self._uri = uri
        self._credentials = credentials
        self._lock = threading.Lock()
        self._flights: list[fl.FlightClient] = []

    def fetch(self, refs: Sequence[Ref], deadline: float) -> list[np.ndarray]:
        """Return one read-only array per ref. `deadline` is in seconds of `time.monotonic`.

        Raises the first error of any object; this is a ChecksumError if an object or its bytes do not match the ref.
        """
        flights = self._connections()
        call = Call(ticket={}, deadline=deadline, grace_s=1.0)
        arrays = _Arrays(refs)
        small = [at for at, ref in enumerate(refs) if ref.nbytes < RANGES_FROM]
        if small:
            receive_many(flights[0], [refs[at] for at in small], _Part(arrays, small), call)
        for at, ref in enumerate(refs):
            if ref.nbytes >= RANGES_FROM:
                receive_ranges(flights, ref, _Part(arrays, [at]), call)
        return arrays.finished()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            flights, self._flights = self._flights, []
        for flight in flights:
            flight.close()

    def _connections(self) -> list[fl.FlightClient]:
        """Return the connections; open them if there are none."""
        with self._lock:
            if not self._flights:
                self._flights = [connect(self._uri, self._credentials) for _ in range(NUM_STREAMS)]
            return self._flights


class _Arrays:
    """The arrays of one download in this process's memory: one per ref, None until memory is allocated for it."""

    def __init__(self, refs: Sequence[Ref]) -> None:
        self.refs = refs
        self.bytes: list[np.ndarray | None] = [None] * len(refs)
        self.done = [False] * len(refs)

    def finished(self) -> list[np.ndarray]:
        """Return the arrays, read-only. Raises ChecksumError if an array is not complete."""
        arrays = []
        for ref, data, is_done in zip(self.refs, self.bytes, self.done, strict=True):
            if data is None or not is_done:
                raise ChecksumError(f"the stream ended before {ref.name} had arrived; ask again")
            array = data.view(ref.dtype).reshape(ref.shape)
            array.flags.writeable = False
            arrays.append(array)
        return arrays


class _Part:
    """The sink for some of the objects of a download. `places` are the positions of these objects among all refs."""

    def __init__(self, arrays: _Arrays, places: Sequence[int]) -> None:
        self._arrays = arrays
        self._places = places

    def open(self, at: int, ref: Ref, *, can_wait: bool = True) -> np.ndarray:
        """Return aligned memory for an object, after a check that the object matches its ref."""
        place = self._places[at]
        check_version(self._arrays.refs[place], ref.version)
        check_layout(self._arrays.refs[place], ref.dtype, ref.shape, ref.nbytes)
        raw = np.empty(ref.nbytes + _ALIGN, np.uint8)
        start = -raw.ctypes.data % _ALIGN
        data = raw[start : start + ref.nbytes]
        self._arrays.bytes[place] = data
        return data

    def done(self, whole: Sequence[Whole]) -> None:
        """Note that these objects are complete."""
        for at, _, _ in whole:
            self._arrays.done[self._places[at]] = True

    def discard(self, at: int) -> None:
        """Release the memory of an object that did not arrive."""
        self._arrays.bytes[self._places[at]] = None

    def failed(self, at: int, error: DataPlaneError) -> None:
        """Raise the error: a resolve returns all objects or none, as for readers that map the arena."""
        raise error
