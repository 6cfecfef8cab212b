"""Converts values of table cells to JSON: times to ISO 8601, durations to seconds, decimals to text, NaN to null."""

import datetime
import decimal
import json
import math
import uuid
from collections.abc import Mapping
from typing import Any

from dataplane.datasets.formats.shard import MAX_FIELDS_BYTES


def json_safe(value: Any) -> Any:
    """Return the value with every type that JSON lacks converted. TypeError for bytes, which no field may hold."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return _converted(value)


def _converted(value: Any) -> Any:
    """Return a value of a type that JSON lacks in one of JSON's types."""
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (decimal.Decimal, uuid.UUID)):
        return str(value)
    raise TypeError(f"a field of type {type(value).__name__}, which JSON cannot hold")


_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_converted).encode


def fields_json(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the fields as JSON text and an empty string, or `{}` and the reason why a node cannot serve them."""
    try:
        text = _to_json(values)
        if len(text) <= MAX_FIELDS_BYTES // 8:  # a value takes up to thirty times as much memory as its text
            return text, ""
    except (TypeError, ValueError, RecursionError):
        pass  # it holds NaN, or something else that takes a closer look
    try:
        fields, reason = checked_fields(values)
        return _to_json(fields), reason
    except RecursionError:
        return "{}", "fields inside each other too deeply"


def checked_fields(values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the fields as JSON values, or the reason why a node cannot serve them."""
    try:
        fields = json_safe(values)
    except TypeError as error:
        return {}, str(error)
    num_chars = _num_chars(fields)
    if num_chars > MAX_FIELDS_BYTES:
        return {}, f"fields of {num_chars} characters; wanted at most {MAX_FIELDS_BYTES}"
    return fields, ""


def _num_chars(value: Any) -> int:
    """Return about how many characters the value takes as JSON, or bytes of memory beside its texts: a list or an
    object that is empty counts too."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 8 + sum(len(key) + _num_chars(item) for key, item in value.items())
    return 8 + sum(map(_num_chars, value)) if isinstance(value, list) else 8
