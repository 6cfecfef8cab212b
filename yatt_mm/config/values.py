"""The types of the values in the configuration's sections."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

SIZE_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(value: object) -> int:
    """Return the bytes of `value`: an int, or a text such as `512MiB` or `1.5GiB`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(value))
    if not match or match[2].upper() not in SIZE_UNITS:
        raise ValueError(f"found {value!r}; wanted a size such as 512MiB or 1.5GiB")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A part of the tree. Unknown keys are errors, and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
