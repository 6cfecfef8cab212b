"""Converts values of table cells to JSON: times to ISO 8601, durations to seconds, decimals to text, NaN to null."""

import datetime
import decimal
import math
import uuid
from typing import Any


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
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (decimal.Decimal, uuid.UUID)):
        return str(value)
    raise TypeError(f"a field of type {type(value).__name__}, which JSON cannot hold")
