"""Reads the members of a tar that hold fields: `.json`, and WebDataset's `.txt`, `.cls` (a whole number) and `.npy` (an
array).

The values of a `.json` object are the fields. The others are one field each, with the name of the member between the
key and the type: `0007.question.txt` of the sample `0007` is the field `question`, and `0007.txt` is the field `txt`.
Where both have a field, that of the `.json` object counts.
"""

import io
import json
import math
import tokenize
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy

from dataplane.datasets.formats.json_safe import fields_json, json_safe
from dataplane.datasets.formats.media_values import without_data
from dataplane.datasets.formats.parsed_rows import ParsedRow
from dataplane.datasets.formats.range_files import RangeFile

JSON = "json"
MAX_VALUES = 1 << 20
"""The most values of an array."""


def holds_fields(extension: str) -> bool:
    """Return True if members with this extension hold fields. The extension may have several parts."""
    return extension == JSON or extension.rpartition(".")[2] in _READERS


def parse_members(
    file: RangeFile, members: Sequence[tuple[int, str, int, int]], drop: Collection[str]
) -> Iterator[tuple[int, ParsedRow]]:
    """Yield the fields of each member, without those of `drop`. `members`: the number, extension, offset and size of
    each."""
    for number, extension, offset, nbytes in members:
        try:
            found = read_member(extension, file.read(offset, nbytes))
        except ValueError as error:
            yield number, ParsedRow(reason=str(error))
            continue
        kept = {name: value for name, value in found.items() if name not in drop}
        fields, reason = fields_json(without_data(kept))
        yield number, ParsedRow(fields=fields, reason=reason)


def read_member(extension: str, data: bytes) -> dict[str, Any]:
    """Return the fields in the bytes of a member. Raises ValueError with what is wrong with it."""
    if extension == JSON:
        return _read_object(data)
    name, _, kind = extension.rpartition(".")
    value = _READERS[kind](data)
    return {name or kind: value}


def _read_object(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"holds a JSON {type(fields).__name__}; wanted an object")
    return fields


def _read_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is no text in UTF-8: {error.reason} at byte {error.start}") from error


def _read_class(data: bytes) -> int:
    text = _read_text(data)
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"holds {text[:40]!r}; wanted a whole number") from error


def _read_array(data: bytes) -> Any:
    """Return the values of an array as nested lists. The header is checked first, because it may name any size."""
    file = io.BytesIO(data)
    try:
        version = npy.read_magic(file)
        shape, is_fortran, dtype = _HEADERS[version](file)
        if dtype.kind not in "biufU":
            raise ValueError(f"of type {dtype}")
        if min(shape, default=0) < 0 or math.prod(max(1, length) for length in shape) > MAX_VALUES:
            raise ValueError(
                f"of shape {shape}; wanted at most {MAX_VALUES} values, since fields go to all controllers"
            )
        values = np.frombuffer(data, dtype, offset=file.tell(), count=math.prod(shape))
        array = values.reshape(shape, order="F" if is_fortran else "C")
    except (
        ValueError,
        KeyError,
        OverflowError,
        SyntaxError,
        TypeError,
        MemoryError,
        RecursionError,
        tokenize.TokenError,
    ) as error:
        raise ValueError(f"is no array of numbers or texts: {error}") from error
    return json_safe(array.tolist())


_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_READERS: Mapping[str, Callable[[bytes], Any]] = {"txt": _read_text, "cls": _read_class, "npy": _read_array}
