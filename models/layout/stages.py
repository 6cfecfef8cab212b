"""Divides the decoder's layers over pipeline stages. No torch here.

Stages have equal numbers of layers, unless the first or the last has its own number: the first also has the vision
tower, the last the head. In a virtual pipeline every stage's layers are divided again, into `vpp` chunks.
"""

from __future__ import annotations

import math

from models.layout.divisors import check_divides, divisors, nearest


def stage_layers(
    num_layers: int, *, pp: int, vpp: int = 1, first: int | None = None, last: int | None = None
) -> list[int]:
    """Return [pp] the number of layers of each stage. Raises ValueError, with a division that fits, if they do not
    divide."""
    if pp == 1:
        _check_single(vpp, first, last)
        return [num_layers]
    if first is None and last is None:
        check_divides("parallel.pp", pp, "layers", num_layers)
    num_others = pp - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    if left < num_others or left % max(1, num_others) or (left and not num_others):
        raise ValueError(
            f"parallel.first_stage_layers {first} and last_stage_layers {last} leave {left} of {num_layers} layers to "
            f"{num_others} other stages, which do not divide; {_advice(num_layers, num_others, first, last)}"
        )
    middle = left // max(1, num_others)
    stages = [first or middle, *[middle] * (pp - 2), last or middle]
    if any(layers % vpp for layers in stages):
        raise ValueError(
            f"parallel.vpp is {vpp} and the stages have {stages} layers, which do not divide by it; choose "
            f"{nearest(divisors(math.gcd(*stages)), vpp)}"
        )
    return stages


def check_deepstack(num_first: int, vpp: int, num_deepstack: int) -> None:
    """Raise ValueError unless all layers that add features of the vision tower are in the first stage's first chunk,
    because only that chunk has the features. `num_first`: layers of the first stage."""
    if num_first // vpp < num_deepstack:
        run = "run of layers" if vpp > 1 else "stage"
        change = f"lower parallel.vpp (now {vpp}), " if vpp > 1 else ""
        raise ValueError(
            f"the pipeline's first {run} has {num_first // vpp} layers and the first {num_deepstack} layers add "
            f"features of the vision tower, so they must be there: {change}lower parallel.pp, or set "
            f"parallel.first_stage_layers to {num_deepstack * vpp} or more"
        )


def _check_single(vpp: int, first: int | None, last: int | None) -> None:
    for key, value in (("vpp", vpp if vpp > 1 else None), ("first_stage_layers", first), ("last_stage_layers", last)):
        if value is not None:
            raise ValueError(f"parallel.{key} is {value} and parallel.pp is 1: one stage; leave {key} out or raise pp")


def _advice(num_layers: int, num_others: int, first: int | None, last: int | None) -> str:
    """Return advice: the nearest number of layers for the first or the last stage with which the other stages share the
    rest equally."""
    key, found, other = ("last_stage_layers", last, first) if first is None else ("first_stage_layers", first, last)
    left = num_layers - (other or 0)
    fitting = [n for n in range(1, left + 1) if n <= left - num_others and (left - n) % max(1, num_others) == 0]
    if not num_others:
        fitting = [n for n in fitting if n == left]
    return f"set {key} to {nearest(fitting, found or 1)}" if fitting else "give them fewer layers, or lower parallel.pp"
