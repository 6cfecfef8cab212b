"""The messages from controllers to the keeper: finished groups whose responses people may read. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from yatt_mm.protocol.control import ScoredGroup

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """One group to keep."""

    scored: ScoredGroup
    advantages: tuple[float, ...] | None
    """[G] the advantage of each response; None if the step does not train on the group."""
