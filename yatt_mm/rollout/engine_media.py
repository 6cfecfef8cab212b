"""Turning a derived ref and its view into the values that prompts and engines need of a medium.

All facts come from the ref's metadata; `patches` is the view itself, without a copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dataplane.core.refs import Ref
from yatt_mm.common.media_refs import kind_of
from yatt_mm.rollout.engine_types import Medium
from yatt_mm.rollout.prompt_template import MediumSize


def size_of(ref: Ref) -> MediumSize:
    """Return the size of a medium in a prompt. Raises ValueError if the ref does not name derived patches."""
    return MediumSize(
        num_tokens=int(_meta(ref, "num_tokens")),
        kind=kind_of(ref),
        timestamps=tuple(ref.meta.get("grid_timestamps", ())),
    )


def medium_of(ref: Ref, view: np.ndarray) -> Medium:
    """Return a resolved medium in the engine's form. Raises ValueError if the ref does not name derived patches."""
    temporal, height, width = _meta(ref, "grid_thw")
    return Medium(
        kind=kind_of(ref),
        digest=ref.name,
        patches=view,
        grid_thw=(temporal, height, width),
        seconds_per_grid=seconds_per_grid(ref),
    )


def seconds_per_grid(ref: Ref) -> float:
    """Return the seconds between two temporal steps of a video's grid; 1.0 for images, for which it has no effect."""
    return float(ref.meta.get("second_per_grid_t", 1.0))


def _meta(ref: Ref, key: str) -> Any:
    """Return a value of the ref's metadata. Raises ValueError if it is missing."""
    if key not in ref.meta:
        raise ValueError(
            f"ref {ref.name} ({ref.kind}) has no {key}; an engine needs derived patches: send the refs that the data "
            "plane's derive returned"
        )
    return ref.meta[key]
