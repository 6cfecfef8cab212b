"""Values of table cells as JSON has them: times as ISO 8601, durations as seconds, decimals as text, NaN as null."""

import datetime
import decimal
import math
import uuid
from typing import Any


def json_safe(value: Any) -> Any:
    """The value with everything in it that JSON lacks put into words. TypeError for bytes, which no field may hold."""
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
