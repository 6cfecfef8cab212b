"""Sizes and durations as text: format bytes and seconds for people, parse sizes such as `512MiB`."""

import re

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes as text for people: `1.5 GiB` for 1610612736."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{int(nbytes)} B"


def format_seconds(seconds: float) -> str:
    """Return a duration as text for people: `1.23 ms` for 0.00123."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def parse_bytes(text: str) -> int:
    """Return the number of bytes that `1GiB`, `512MiB`, `1.5GB` or `1048576` means. Raises ValueError for other
    text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; wanted for example 512MiB, 1GiB or 1048576")
    return int(float(match[1]) * _UNITS[match[2].lower()])
