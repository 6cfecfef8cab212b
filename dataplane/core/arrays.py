"""The dtypes, shapes and sizes that an object may have. Standard library only."""

import math
from collections.abc import Mapping, Sequence

from dataplane.core.errors import BadRequestError

MAX_DIMS = 32
"""The largest number of dimensions of an object's shape."""
MAX_NUMBER = 1 << 63
"""The number that every size, offset and count is smaller than."""


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


def check_array(dtype: str, shape: Sequence[int] | None, nbytes: int, what: str = "") -> tuple[int, ...]:
    """Check that dtype and shape fit `nbytes` bytes, and return the shape. Without `shape`, the array has one
    dimension.

    Raises BadRequestError if they do not agree; `what` begins the names of the values in its message.
    """
    if dtype not in ITEM_BYTES:
        raise BadRequestError(f"{what}dtype is {dtype[:80]!r}; wanted one of {', '.join(ITEM_BYTES)}")
    item = ITEM_BYTES[dtype]
    if shape is None:
        if nbytes % item:
            raise BadRequestError(
                f"{nbytes} bytes are not a whole number of {dtype} items ({item} bytes each); give the dtype"
            )
        return (nbytes // item,)
    check_shape(shape, what + "shape")
    if math.prod(shape) * item != nbytes:
        raise BadRequestError(
            f"{what}shape {list(shape)} of {dtype} takes {math.prod(shape) * item} bytes, found {str(nbytes)[:40]} as "
            f"{what}nbytes: change one of them"
        )
    if nbytes >= MAX_NUMBER:
        raise BadRequestError(f"{what}nbytes is {str(nbytes)[:40]}; wanted a number that fits 64 bits")
    return tuple(shape)


def check_shape(shape: Sequence[object], what: str = "shape") -> None:
    """Check that an array can have this shape. Raises BadRequestError, with `what` in its message, if not."""
    if len(shape) > MAX_DIMS:
        raise BadRequestError(f"{what} has {len(shape)} dimensions; wanted at most {MAX_DIMS}")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim < MAX_NUMBER:
            found = str(list(shape))[:80]
            raise BadRequestError(f"{what} is {found}; wanted whole numbers that are not negative and fit 64 bits")
