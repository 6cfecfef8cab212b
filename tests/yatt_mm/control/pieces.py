"""Groups and pieces in the form that balancing uses, from a few numbers."""

from __future__ import annotations

from yatt_mm.training.microbatches import Piece, WorkGroup


def work_group(position: int, rows: list[tuple[int, int]], image: tuple[int, int] = (0, 0)) -> WorkGroup:
    """Return a group. `rows` are pairs (tokens, cost); `image` is a pair (patches, cost)."""
    return WorkGroup(
        position=position,
        num_tokens=tuple(tokens for tokens, _ in rows),
        num_patches=image[0],
        row_costs=tuple(cost for _, cost in rows),
        shared_cost=image[1],
    )


def single(position: int, cost: int, *, tokens: int = 1, patches: int = 0) -> Piece:
    """Return the piece of a group with one row, whose images cost nothing."""
    return Piece(group=work_group(position, [(tokens, cost)], (patches, 0)), rows=(0,))
