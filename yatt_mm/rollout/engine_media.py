"""From derived refs and their views to what prompts and engines are told of a medium."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataplane.core.refs import Ref
from yatt_mm.common.media_refs import kind_of
from yatt_mm.rollout.engine_types import Medium
from yatt_mm.rollout.prompt_template import MediumSize


def size_of(ref: Ref) -> MediumSize:
    """What a prompt must know of a medium. Raises ValueError where the ref is not one of derived patches."""
    return MediumSize(
        num_tokens=int(_meta(ref, "num_tokens")),
        kind=kind_of(ref),
        timestamps=tuple(ref.meta.get("grid_timestamps", ())),
    )


def medium_of(ref: Ref, view: np.ndarray) -> Medium:
    """What an engine is told of a resolved medium. Raises ValueError where the ref is not one of derived patches."""
    temporal, height, width = _meta(ref, "grid_thw")
    return Medium(
        kind=kind_of(ref),
        digest=ref.name,
        patches=view,
        grid_thw=(temporal, height, width),
        seconds_per_grid=seconds_per_grid(ref),
    )


def seconds_per_grid(ref: Ref) -> float:
    """From one t of a video's grid to the next; images have no time, and any number will do."""
    return float(ref.meta.get("second_per_grid_t", 1.0))


def _meta(ref: Ref, key: str) -> Any:
    if key not in ref.meta:
        raise ValueError(
            f"ref {ref.name} ({ref.kind}) says nothing about its {key}; a rollout wants derived patches: send the refs "
            "that the data plane's derive gave"
        )
    return ref.meta[key]
