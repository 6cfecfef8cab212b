"""What a client says of the objects that it stores, and how many of them it stores in one go."""

from collections.abc import Iterator, Sequence
from typing import Any

from dataplane.core.errors import BadRequestError
from dataplane.core.json_body import check_plain_name
from dataplane.core.refs import ArraySpec
from dataplane.core.schemas import check_array

GROUP_BYTES, GROUP_OBJECTS = 64 << 20, 512
"""At most so much of a put of many goes in one go."""

Buffer = Any  # anything with the buffer protocol: bytes, memoryview, pa.Buffer, a contiguous numpy array


def plain_body(spec: ArraySpec, nbytes: int, *, scope: str | None, durable: bool) -> dict[str, Any]:
    """The request to store `nbytes` bytes as a plain object; BadRequestError if they are not what `spec` says."""
    return {
        "kind": "plain",
        "name": check_plain_name(spec.name),
        "dtype": spec.dtype,
        "shape": list(check_array(spec.dtype, spec.shape, nbytes)),
        "meta": dict(spec.meta),
        "scope": scope,
        "durable": durable,
    }


def groups(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of runs that are put together: a node holds all places of a run until it is sealed."""
    start = total = 0
    for at, nbytes in enumerate(sizes):
        if at > start and (total + nbytes > GROUP_BYTES or at - start >= GROUP_OBJECTS):
            yield start, at
            start, total = at, 0
        total += nbytes
    if sizes:
        yield start, len(sizes)


def flat(data: Buffer) -> memoryview:
    """The bytes of a buffer. BadRequestError if it is none, or not contiguous."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise BadRequestError(f"cannot store {type(data).__name__} ({error}); wanted a contiguous buffer") from error
