"""Requests of a client's put: the body that describes an object, and the batches in which many objects are stored."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from dataplane.core.arrays import check_array
from dataplane.core.errors import BadRequestError
from dataplane.core.json_body import check_plain_name
from dataplane.core.refs import ArraySpec

GROUP_BYTES, GROUP_OBJECTS = 64 << 20, 512
"""The maximum number of bytes, and of objects, that a put of many objects stores in one request."""

Durable = bool | Literal["unsynced"]
"""How a stored object outlives its node: not at all (False); on the disk, also after a failure of the machine (True);
or as a file that the system writes later, which outlives only the process of the node ("unsynced")."""
Buffer = Any
"""Any object with the buffer protocol: bytes, memoryview, pa.Buffer, a contiguous numpy array."""


def plain_body(spec: ArraySpec, nbytes: int, *, scope: str | None, durable: Durable) -> dict[str, Any]:
    """Return the request body for a plain object of `nbytes` bytes. Raises BadRequestError if `nbytes` does not fit
    `spec`."""
    return {
        "kind": "plain",
        "name": check_plain_name(spec.name),
        "dtype": spec.dtype,
        "shape": list(check_array(spec.dtype, spec.shape, nbytes)),
        "meta": dict(spec.meta),
        "scope": scope,
        "durable": durable,
    }


def batch_ranges(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each group of objects to store in one request, within `GROUP_BYTES` and `GROUP_OBJECTS`.

    Groups are limited because a node reserves the slabs of a whole group until all of them are sealed.
    """
    start = total = 0
    for at, nbytes in enumerate(sizes):
        if at > start and (total + nbytes > GROUP_BYTES or at - start >= GROUP_OBJECTS):
            yield start, at
            start, total = at, 0
        total += nbytes
    if sizes:
        yield start, len(sizes)


def as_bytes_view(data: Buffer) -> memoryview:
    """Return the bytes of a buffer, without a copy. Raises BadRequestError if `data` is not a buffer or not
    contiguous."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise BadRequestError(f"cannot store {type(data).__name__} ({error}); wanted a contiguous buffer") from error
