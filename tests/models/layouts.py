"""The layouts in which every model must give the same numbers. `make parity` runs each layout that is added here, and
`make test` those that divide the work in several ways at once."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

from models.layout.parallel import Parallel

LAYOUTS = {
    "tp1": Parallel(),
    "tp2": Parallel(tp=2),
    "tp2-sp": Parallel(tp=2, sp=True),
    "tp4-sp": Parallel(tp=4, sp=True),
    "pp2": Parallel(pp=2),
    "dp2": Parallel(dp=2),
    "tp2-pp2": Parallel(tp=2, pp=2),
    "tp2-pp2-sp": Parallel(tp=2, pp=2, sp=True),
    "ep2": Parallel(ep=2, dp=2),
    "etp2": Parallel(etp=2, dp=2),
    "tp2-sp-ep2": Parallel(tp=2, sp=True, ep=2),
    "tp2-sp-etp2": Parallel(tp=2, sp=True, etp=2),
    "tp2-pp2-sp-ep2": Parallel(tp=2, pp=2, sp=True, ep=2),
    "tp2-sp-ep2-etp2-dp2": Parallel(tp=2, sp=True, ep=2, etp=2, dp=2),
    "tp2-pp2-sp-ep4-dp2": Parallel(tp=2, pp=2, sp=True, ep=4, dp=2),
    "cp2": Parallel(cp=2),
    "cp2-zigzag": Parallel(cp=2, cp_order="zigzag"),
    "cp2-allgather": Parallel(cp=2, cp_comm="allgather"),
    "cp2-allgather-zigzag": Parallel(cp=2, cp_comm="allgather", cp_order="zigzag"),
    "tp2-cp2-sp": Parallel(tp=2, cp=2, cp_order="zigzag", sp=True),
    "tp2-pp2-cp2-sp": Parallel(tp=2, pp=2, cp=2, sp=True),
    "cp2-ep2": Parallel(cp=2, ep=2),
    "tp2-cp2-sp-ep4": Parallel(tp=2, cp=2, sp=True, ep=4),
}
"""The layouts, with at most 8 ranks each. Those with ep or etp are for models with experts; those with tp and without
sp for the other models."""

QUICK = (
    "tp1",
    "dp2",
    "cp2-allgather-zigzag",
    "cp2-zigzag",
    "tp2-pp2-sp",
    "tp2-sp-ep2-etp2-dp2",
    "tp2-pp2-sp-ep4-dp2",
)
"""The layouts of `make test`."""
QUICK_ONCE = {"tp2-pp2-cp2-sp": "qwen3_vl"}
"""[layout] the one family that `make test` tests in it, because it takes eight ranks."""

TIED_LAYOUTS = ("tp1", "pp2", "tp2-pp2")
"""The layouts that test a head which shares the embedding's weights."""


FEWER = {"internvl": ("tp1", "tp2-sp", "pp2", "dp2", "tp2-pp2-sp", "cp2-zigzag", "cp2-allgather")}
"""The layouts that cut the tower or the positions. They are enough for a family whose decoder is tested with another
family."""

QWEN3_LAYOUTS = ("tp1", "tp2-pp2-sp")
"""The layouts for the second decoder that InternVL may have."""


def layouts_for(family: str) -> list[str]:
    """Return the layouts in which a family is compared with transformers."""
    if family in FEWER:
        return list(FEWER[family])
    has_experts = family in WITH_EXPERTS
    return [
        name
        for name, parallel in LAYOUTS.items()
        if (not has_experts or parallel.tp == 1 or parallel.sp) and (has_experts or parallel.ep == parallel.etp == 1)
    ]


WITH_EXPERTS = ("qwen3_vl_moe",)


def quick_layouts(family: str) -> list[str]:
    """Return the layouts in which `make test` compares a family with transformers."""
    return [*QUICK, *(layout for layout, one in QUICK_ONCE.items() if one == family)]


def quick_first(names: Iterable[str], quick: Container[str], *before: str) -> list[Any]:
    """Return a parameter for each name, with the values `before` it. Names that are not `quick` are for `make parity`
    alone."""
    return [pytest.param(*before, name, marks=() if name in quick else pytest.mark.parity) for name in names]
