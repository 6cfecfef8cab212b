"""Microbatches of one replica: pieces of groups packed under a cap of tokens and one of patches. No torch.

A piece is the rows of one group in one microbatch; they share one encoding of their images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yatt_mm.training.largest_differencing import largest_differencing


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a microbatch may hold, and how many there may be."""

    max_tokens: int
    max_patches: int | None = None
    """The most patches of a microbatch. None leaves the limit to the tokens, because an image has a fixed number of
    patches per token."""
    multiple_of: int = 1
    """The number of microbatches is a multiple of this (an interleaved pipeline schedule needs the number of
    stages)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkGroup:
    """A group in the form that balancing uses."""

    position: int
    """The prompt's position in the run's order."""
    num_tokens: tuple[int, ...]
    """[G] prompt and response, image placeholders expanded."""
    num_patches: int
    """The number of rows that the vision tower reads for the prompt's media."""
    row_costs: tuple[int, ...]
    """[G] the work of each row alone."""
    shared_cost: int
    """The work that rows in the same microbatch share: the encoding of their media."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Rows of one group that go into a microbatch together. Two pieces are equal only if they are the same object."""

    group: WorkGroup
    rows: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """The tokens of all its rows."""
        return sum(self.group.num_tokens[row] for row in self.rows)

    @property
    def cost(self) -> int:
        """The operations of the piece: those of its rows, and of encoding the media once."""
        return self.group.shared_cost + sum(self.group.row_costs[row] for row in self.rows)


def cut(group: WorkGroup, limits: Limits, *, rows: Sequence[int] | None = None) -> list[Piece]:
    """Cut some `rows` of the group, or all, into pieces by the first-fit rule, longest rows first.

    Raises:
        ValueError: a row or the group's images do not fit a microbatch.
    """
    if limits.max_patches is not None and group.num_patches > limits.max_patches:
        raise ValueError(
            f"the images of prompt {group.position} have {group.num_patches} patches; "
            f"train.max_patches_per_microbatch is {limits.max_patches}: raise it, or lower the image size"
        )
    pieces: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(group.num_tokens)) if rows is None else rows, key=lambda row: -group.num_tokens[row]):
        needed = group.num_tokens[row]
        if needed > limits.max_tokens:
            raise ValueError(
                f"a sample of prompt {group.position} has {needed} tokens; train.max_tokens_per_microbatch is "
                f"{limits.max_tokens}: raise it, or lower rollout.max_tokens or the image size"
            )
        k = next((k for k, free in enumerate(room) if free >= needed), len(room))
        if k == len(room):
            pieces.append([])
            room.append(limits.max_tokens)
        pieces[k].append(row)
        room[k] -= needed
    return [Piece(group=group, rows=tuple(sorted(piece))) for piece in pieces]


def num_microbatches(replicas: Sequence[Sequence[Piece]], limits: Limits) -> int:
    """Return the number of microbatches of every replica: what the fullest needs, rounded up to the required
    multiple."""
    most = max(len(_first_fit(pieces, limits)) for pieces in replicas)
    return -(-max(1, most) // limits.multiple_of) * limits.multiple_of


def lay_out(pieces: Sequence[Piece], num: int, limits: Limits) -> list[list[Piece]]:
    """Return `num` microbatches of nearly equal work; some may be empty. `num` must come from `num_microbatches`.

    Small microbatches are first and last, where a pipeline fills and drains, because its stages then wait less (like
    verl's `rearrange_micro_batches`).
    """
    parts = largest_differencing([piece.cost for piece in pieces], num)
    found = [[pieces[i] for i in part] for part in parts]
    if not all(_fits(part, limits) for part in found):
        found = _least_work_with_room(pieces, num, limits) or _first_fit(pieces, limits)
    found += [[] for _ in range(num - len(found))]
    found.sort(key=lambda part: -sum(piece.cost for piece in part))
    return found[::2][::-1] + found[1::2]


def _fits(part: Sequence[Piece], limits: Limits) -> bool:
    if sum(piece.num_tokens for piece in part) > limits.max_tokens:
        return False
    return limits.max_patches is None or sum(piece.group.num_patches for piece in part) <= limits.max_patches


class _Bin:
    """A microbatch that is being filled."""

    def __init__(self, limits: Limits) -> None:
        self.pieces: list[Piece] = []
        self.cost = 0
        self._tokens = limits.max_tokens
        self._patches = limits.max_patches

    def has_room(self, num_tokens: int, num_patches: int) -> bool:
        return num_tokens <= self._tokens and (self._patches is None or num_patches <= self._patches)

    def add(self, piece: Piece, num_tokens: int) -> None:
        self.pieces.append(piece)
        self.cost += piece.cost
        self._tokens -= num_tokens
        if self._patches is not None:
            self._patches -= piece.group.num_patches


def _first_fit(pieces: Sequence[Piece], limits: Limits) -> list[list[Piece]]:
    """Return as few microbatches as first fit finds, longest pieces first."""
    bins: list[_Bin] = []
    for piece, num_tokens in _longest_first(pieces):
        target = next((b for b in bins if b.has_room(num_tokens, piece.group.num_patches)), None)
        if target is None:
            target = _Bin(limits)
            bins.append(target)
        target.add(piece, num_tokens)
    return [b.pieces for b in bins]


def _least_work_with_room(pieces: Sequence[Piece], num: int, limits: Limits) -> list[list[Piece]] | None:
    """Return `num` microbatches, each piece in the one with the least work that has room; None if a piece finds no
    room."""
    bins = [_Bin(limits) for _ in range(num)]
    for piece, num_tokens in _longest_first(pieces):
        open_bins = [b for b in bins if b.has_room(num_tokens, piece.group.num_patches)]
        if not open_bins:
            return None
        min(open_bins, key=lambda b: b.cost).add(piece, num_tokens)
    return [b.pieces for b in bins]


def _longest_first(pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
    return sorted(((piece, piece.num_tokens) for piece in pieces), key=lambda item: -item[1])
