"""The Arrow schemas of Flight messages, and columns made of packed bytes.

`pa.array` looks for a pandas object first: its first call in a process imports pandas where that is installed, which
takes longer than all other imports of a node. Columns of packed bytes do not.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import pyarrow as pa
import pyarrow.flight as fl

from dataplane.core.errors import BadRequestError

BATCH_BYTES = 2 << 20
"""The number of bytes in one record batch of a DoGet or DoPut. Flight is fastest between 1 and 8 MiB."""


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


def packed_numbers(kind: pa.DataType, code: str, values: Iterable[int]) -> pa.Array:
    """Return a primitive Arrow array of these values. `code` is the struct format character of its items."""
    packed = array(code, values)
    return pa.Array.from_buffers(kind, len(packed), [None, pa.py_buffer(packed)], 0)


def packed_strings(values: Sequence[bytes]) -> pa.Array:
    """Return a `string` array of these texts, which are UTF-8."""
    ends = array("i", accumulate(map(len, values), initial=0))
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(ends), pa.py_buffer(b"".join(values)))
