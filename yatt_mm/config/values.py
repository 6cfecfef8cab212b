"""The types of the values in the configuration's sections, and values that depend on a choice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

SIZE_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(value: object) -> int:
    """Return the bytes of `value`: an int, or a text such as `512MiB` or `1.5GiB`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(value))
    if not match or match[2].upper() not in SIZE_UNITS:
        raise ValueError(f"found {value!r}; wanted a size such as 512MiB or 1.5GiB")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


TIME_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(value: object) -> float:
    """Return the seconds of `value`: a number, or a text such as `90m`, `12h`, `2d`, `11:30:00` or `1-12:00:00`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = str(value).strip()
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text):
        return float(match[1]) * TIME_UNITS[match[2]]
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    raise ValueError(f"found {value!r}; wanted seconds, or a time such as 90m, 12h, 2d, 11:30:00 or 1-12:00:00")


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0)]


class Section(BaseModel):
    """A part of the tree. Unknown keys are errors, and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def filled(value: Any, info: ValidationInfo, choice: str, reads: Mapping[str, Any] | None) -> Any:
    """Return a setting's value, or without one the default that a choice made before it gives. `reads`: by name the
    settings that the choice reads, with their defaults; None if the choice itself was refused.

    Raises:
        ValueError: there is a value, and the choice does not read it.
    """
    setting = str(info.field_name)
    if reads is None:
        return value
    if value is None:
        return reads.get(setting)
    if setting not in reads:
        others = f"; it reads {', '.join(reads)}" if reads else ", and no other setting"
        raise ValueError(f"{choice} does not read it{others}")
    return value
