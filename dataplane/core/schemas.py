"""The Arrow schemas of Flight messages, and the dtypes and shapes that objects may have."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError
from dataplane.core.refs import check_shape

BATCH_BYTES = 2 << 20
"""The number of bytes in one record batch of a DoGet or DoPut. Flight is fastest between 1 and 8 MiB."""


ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}
"""The bytes per item of every dtype that an object may have, by numpy name."""


LOCATORS = pa.schema(
    [
        ("segment", pa.int32()),
        ("offset", pa.int64()),
        ("nbytes", pa.int64()),
        ("dtype", pa.dictionary(pa.int8(), pa.string())),
        ("shape", pa.list_(pa.int64())),
        ("version", pa.int64()),
        ("lease", pa.int64()),
    ]
)
"""The schema of the reply to a resolve, with one row per requested object. `offset` is -1 if the object is not
resident."""


PIECES = pa.schema(
    [
        ("object", pa.int32()),
        ("start", pa.int64()),
        ("info", pa.string()),
        ("data", pa.binary_view()),
    ]
)
"""The schema of a DoGet of many objects. Each row is one piece of an object: the object's position among the requested
refs, the piece's start in bytes, and its bytes.

`info` is set in the first row of each object: JSON {"checksum"}, with "ref" if the object's ref differs from the
requested one; or {"error", "message"} instead of bytes. The column of bytes is a view column, so that a batch of many
objects is sent without copying them together.
"""

INLINE_BYTES = 12
"""The length in bytes up to which Arrow keeps a value of a view column inside its view."""


def check_array(dtype: str, shape: Sequence[int] | None, nbytes: int) -> tuple[int, ...]:
    """Check that dtype and shape fit `nbytes` bytes, and return the shape. Without `shape`, the array has one
    dimension.

    Raises BadRequestError if they do not agree.
    """
    if dtype not in ITEM_BYTES:
        raise BadRequestError(f"dtype is {dtype!r}; wanted one of {', '.join(ITEM_BYTES)}")
    item = ITEM_BYTES[dtype]
    if shape is None:
        if nbytes % item:
            raise BadRequestError(
                f"{nbytes} bytes are not a whole number of {dtype} items ({item} bytes each); give the dtype"
            )
        return (nbytes // item,)
    try:
        check_shape(shape)
    except ValueError as error:
        raise BadRequestError(str(error)) from error
    if math.prod(shape) * item != nbytes:
        raise BadRequestError(
            f"shape {list(shape)} of {dtype} takes {math.prod(shape) * item} bytes, found {nbytes}: change one of them"
        )
    return tuple(shape)


@contextmanager
def arrow_errors_as_bad_requests(what: str) -> Iterator[None]:
    """Raise BadRequestError if a read inside this `with` block meets a message that is not Arrow IPC.

    Arrow raises errors of many classes for such a message. `what` names the stream in the error. Errors of Flight pass
    unchanged.
    """
    try:
        yield
    except fl.FlightError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        found = str(error).split(". Detail:")[0][:300]
        wanted = "wanted messages as an Arrow library writes them"
        raise BadRequestError(f"{what} is not Arrow IPC ({found}); {wanted}") from error
