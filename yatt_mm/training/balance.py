"""Balances work over data-parallel replicas, because a step lasts as long as the fullest replica. Pure arithmetic, no
torch.

Pieces of groups are dealt out by the largest differencing method. Then a bounded search moves and exchanges pieces, or
single rows, between the fullest replica and the emptiest ones. A row that leaves its group needs another encoding of
its images, and the search counts that. Microbatches are not considered here, nor how a cost is computed
(`step_plan.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from yatt_mm.training.largest_differencing import largest_differencing
from yatt_mm.training.microbatches import Limits, Piece, WorkGroup, cut

TOLERANCE = 5e-3
"""The share of the mean load by which the fullest replica may be above it before anything is moved."""
SMALLEST_GAIN = 1e-3
"""The share of the mean load that an exchange must take off the fuller of two replicas."""
NUM_PARTNERS = 4
"""The number of emptiest replicas that are tried before the search ends."""
EXCHANGES_PER_REPLICA = 8
"""The largest number of exchanges, per replica."""


def spread(groups: Sequence[WorkGroup], num_replicas: int, limits: Limits) -> list[list[Piece]]:
    """Return the pieces of the groups that each replica trains on, by replica. Every row of every group is in exactly
    one piece.

    The order of `groups` does not matter: the groups are sorted by their positions, which all differ.

    Raises:
        ValueError: a row or a group's images do not fit a microbatch.
    """
    ordered = sorted(groups, key=lambda group: group.position)
    pieces = [piece for group in ordered for piece in cut(group, limits)]
    parts = largest_differencing([piece.cost for piece in pieces], num_replicas)
    replicas = [_Replica([pieces[i] for i in part]) for part in parts]
    _search(replicas, limits)
    return [replica.pieces for replica in replicas]


def max_over_mean(loads: Sequence[int]) -> float:
    """Return the largest load divided by the mean load; 1 if there is no work at all."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


class _Replica:
    """The pieces and the load of one replica so far."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.load = sum(piece.cost for piece in pieces)
        self._of_group: dict[int, list[Piece]] = {}
        for piece in pieces:
            self._of_group.setdefault(piece.group.position, []).append(piece)

    @property
    def pieces(self) -> list[Piece]:
        return [piece for pieces in self._of_group.values() for piece in pieces]

    def host(self, guest: Piece, limits: Limits) -> Piece | None:
        """Return a piece of the same group that the guest's rows could join."""
        same = self._of_group.get(guest.group.position, ())
        return next((p for p in same if p.num_tokens + guest.num_tokens <= limits.max_tokens), None)

    def add(self, guest: Piece, limits: Limits) -> None:
        host = self.host(guest, limits)
        if host is None:
            self._of_group.setdefault(guest.group.position, []).append(guest)
            self.load += guest.cost
        else:
            self._replace(host, tuple(sorted(host.rows + guest.rows)))

    def remove(self, offer: _Offer) -> None:
        self._replace(offer.source, tuple(row for row in offer.source.rows if row not in offer.moved.rows))

    def _replace(self, piece: Piece, rows: tuple[int, ...]) -> None:
        same = self._of_group[piece.group.position]
        place = same.index(piece)
        new = [Piece(group=piece.group, rows=rows)] if rows else []
        same[place : place + 1] = new
        self.load += sum(p.cost for p in new) - piece.cost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """Rows that a replica could give to another."""

    source: Piece
    """The piece from which the rows are taken."""
    moved: Piece
    relief: int
    """The load that the giver loses."""
    burden: int
    """The load that the taker gains."""


def _search(replicas: list[_Replica], limits: Limits) -> None:
    for _ in range(EXCHANGES_PER_REPLICA * len(replicas)):
        by_load = sorted(replicas, key=lambda replica: replica.load)
        fullest, mean = by_load[-1], sum(replica.load for replica in replicas) / len(replicas)
        if fullest.load <= mean * (1 + TOLERANCE):
            return
        partners = by_load[: min(NUM_PARTNERS, len(replicas) - 1)]
        if not any(_exchange(fullest, partner, limits, mean * SMALLEST_GAIN) for partner in partners):
            return


def _exchange(full: _Replica, empty: _Replica, limits: Limits, smallest_gain: float) -> bool:
    """Exchange pieces between two replicas so that the fuller one has the least work afterwards. Return False if no
    exchange gains enough."""
    given, taken = _offers(full, empty, limits), _offers(empty, full, limits)
    after = _loads_after(full, empty, given, taken)
    i, j = divmod(int(np.argmin(after)), after.shape[1])
    if after[i, j] > full.load - smallest_gain:
        return False
    full.remove(given[i])
    if j:
        empty.remove(taken[j - 1])
        full.add(taken[j - 1].moved, limits)
    empty.add(given[i].moved, limits)
    return True


def _loads_after(full: _Replica, empty: _Replica, given: list[_Offer], taken: list[_Offer]) -> np.ndarray:
    """Return [given, 1 + taken] the load of the fuller replica after each exchange. In the first column nothing is
    taken in return."""
    relief, burden = (np.array([(offer.relief, offer.burden) for offer in given], dtype=np.float64).T)[..., None]
    back = np.array([(0, 0)] + [(offer.relief, offer.burden) for offer in taken], dtype=np.float64)
    after: np.ndarray = np.maximum(full.load - relief + back[:, 1], empty.load + burden - back[:, 0])
    # if a group moves in both directions, neither offer knows which replica encodes its images afterwards
    positions = np.array([offer.moved.group.position for offer in given])
    back_positions = np.array([offer.moved.group.position for offer in taken], dtype=positions.dtype)
    after[:, 1:][positions[:, None] == back_positions] = np.inf
    return after


def _offers(giver: _Replica, taker: _Replica, limits: Limits) -> list[_Offer]:
    """Return what `giver` can give to `taker` within the limits: every piece as a whole, and every row of a piece with
    several rows."""
    offers = []
    for piece in giver.pieces:
        parts = [piece]
        if len(piece.rows) > 1:
            parts += [Piece(group=piece.group, rows=(row,)) for row in piece.rows]
        for part in parts:
            shared = part.group.shared_cost
            joins = taker.host(part, limits) is not None
            offers.append(
                _Offer(
                    source=piece,
                    moved=part,
                    relief=part.cost if part is piece else part.cost - shared,
                    burden=part.cost - shared if joins else part.cost,
                )
            )
    return offers
