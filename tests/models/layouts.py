"""The layouts in which every model must give the same numbers. Add one here and the whole parity suite runs it."""

from __future__ import annotations

from models.parallel import Parallel

LAYOUTS = {
    "tp1": Parallel(),
    "tp2": Parallel(tp=2),
    "tp2-sp": Parallel(tp=2, sp=True),
    "tp4-sp": Parallel(tp=4, sp=True),
    "pp2": Parallel(pp=2),
    "dp2": Parallel(dp=2),
    "tp2-pp2": Parallel(tp=2, pp=2),
    "tp2-pp2-sp": Parallel(tp=2, pp=2, sp=True),
}
"""At most 8 ranks each."""

TIED_LAYOUTS = ("tp1", "pp2", "tp2-pp2")
"""Those that say something about a head that shares the embedding's weights."""
