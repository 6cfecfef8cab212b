"""Tests of the search that moves and exchanges pieces between replicas, with loads that were computed by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.yatt_mm.control.pieces import single, work_group
from yatt_mm.training.balance import _exchange, _loads_after, _Offer, _offers, _Replica, _search
from yatt_mm.training.microbatches import Limits, Piece, cut

TEN = Limits(max_tokens=10)


def replica(costs: list[int], first: int) -> _Replica:
    """Return a replica with a piece of each cost; `first` is the position of the first one."""
    return _Replica([single(first + k, cost) for k, cost in enumerate(costs)])


def costs(replica: _Replica) -> list[int]:
    return [piece.cost for piece in replica.pieces]


def rows(replica: _Replica) -> list[tuple[int, ...]]:
    return [piece.rows for piece in replica.pieces]


def offer(position: int, relief: int, burden: int) -> _Offer:
    piece = single(position, 1)
    return _Offer(source=piece, moved=piece, relief=relief, burden=burden)


def test_a_guest_joins_a_piece_of_its_group_up_to_the_cap_and_shares_its_images() -> None:
    group = work_group(0, [(4, 10), (3, 20), (3, 30)], (16, 50))
    host, guest = Piece(group=group, rows=(0, 2)), Piece(group=group, rows=(1,))
    full = _Replica([host])
    assert full.load == 90
    full.add(guest, TEN)
    assert (rows(full), full.load) == ([(0, 1, 2)], 110)

    apart = _Replica([host])
    apart.add(guest, Limits(max_tokens=9))
    assert (rows(apart), apart.load) == ([(0, 2), (1,)], 160)


def test_removed_rows_leave_the_other_pieces_of_their_group_alone() -> None:
    group = work_group(0, [(5, 10)] * 6, (16, 50))
    pieces = [Piece(group=group, rows=pair) for pair in ((0, 1), (2, 3), (4, 5))]
    giver = _Replica(pieces)
    row = Piece(group=group, rows=(2,))
    giver.remove(_Offer(source=pieces[1], moved=row, relief=10, burden=60))
    assert (rows(giver), giver.load) == ([(0, 1), (3,), (4, 5)], 200)
    rest = giver.pieces[1]
    giver.remove(_Offer(source=rest, moved=rest, relief=60, burden=60))
    assert (giver.pieces, giver.load) == ([pieces[0], pieces[2]], 140)


def test_a_replica_offers_pieces_and_single_rows_and_counts_where_images_are_encoded() -> None:
    group = work_group(0, [(4, 10), (4, 20), (2, 30)], (16, 50))
    giver = _Replica([Piece(group=group, rows=(0, 1)), single(1, 7)])
    hosting = _Replica([Piece(group=group, rows=(2,))])

    def offered(taker: _Replica, limits: Limits) -> list[tuple[int, tuple[int, ...], int, int]]:
        """Return (position, rows, relief, burden) of each offer."""
        offers = _offers(giver, taker, limits)
        assert [offer.source for offer in offers] == [giver.pieces[0]] * 3 + [giver.pieces[1]]
        return [(offer.moved.group.position, offer.moved.rows, offer.relief, offer.burden) for offer in offers]

    # with the piece goes the encoding of its images; a single row leaves it behind, and needs another one
    assert offered(_Replica([]), TEN) == [(0, (0, 1), 80, 80), (0, (0,), 10, 60), (0, (1,), 20, 70), (1, (0,), 7, 7)]
    # 4 + 4 + 2 tokens are one piece, so the images are encoded already
    assert offered(hosting, TEN) == [(0, (0, 1), 80, 30), (0, (0,), 10, 10), (0, (1,), 20, 20), (1, (0,), 7, 7)]
    nine = Limits(max_tokens=9)
    assert offered(hosting, nine) == [(0, (0, 1), 80, 80), (0, (0,), 10, 10), (0, (1,), 20, 20), (1, (0,), 7, 7)]


def test_the_load_afterwards_is_that_of_the_fuller_replica_and_no_group_moves_both_ways() -> None:
    full, empty = replica([100], first=10), replica([20], first=20)
    given, taken = [offer(1, 30, 40), offer(2, 60, 60)], [offer(2, 10, 15), offer(3, 8, 5)]
    assert _loads_after(full, empty, given, []).tolist() == [[70], [80]], "100-30 and 20+40, 100-60 and 20+60"
    assert _loads_after(full, empty, given, taken).tolist() == [
        [70, 85, 75],  # 100-30+15 and 20+40-10, 100-30+5 and 20+40-8
        [80, np.inf, 72],  # 100-60+5 and 20+60-8
    ]


def test_the_exchange_that_leaves_the_least_load_is_made() -> None:
    # 29 against 9 makes both 80; with nothing in return it would be 71 and 89
    full, empty = replica([60, 29, 11], first=0), replica([9, 51], first=10)
    assert _exchange(full, empty, TEN, 20.0) is True, "a gain of exactly 20 is enough"
    assert (costs(full), full.load) == ([60, 11, 9], 80)
    assert (costs(empty), empty.load) == ([51, 29], 80)


def test_a_piece_is_given_for_nothing_where_that_is_best() -> None:
    full, empty = replica([60, 20], first=0), replica([30, 10], first=10)
    assert _exchange(full, empty, TEN, 1.0) is True
    assert (costs(full), full.load) == ([60], 60)
    assert (costs(empty), empty.load) == ([30, 10, 20], 60)


def test_an_exchange_that_gains_too_little_is_not_made() -> None:
    full, empty = replica([60, 29, 11], first=0), replica([9, 51], first=10)
    assert _exchange(full, empty, TEN, 20.5) is False
    assert (costs(full), full.load) == ([60, 29, 11], 100)
    assert (costs(empty), empty.load) == ([9, 51], 60)


def test_work_moves_from_the_fullest_of_all_replicas() -> None:
    replicas = [replica([80], first=0), replica([80, 40], first=10), replica([40], first=20)]
    _search(replicas, TEN)
    assert [r.load for r in replicas] == [80, 80, 80]


def test_nothing_moves_while_the_fullest_is_within_half_a_percent_of_the_mean() -> None:
    # 4200 * 1.005 is 4221, also as a floating-point number
    replicas = [replica([4200, 21], first=0), replica([4179], first=10)]
    _search(replicas, TEN)
    assert [r.load for r in replicas] == [4221, 4179]
    replicas = [replica([4200, 22], first=0), replica([4178], first=10)]
    _search(replicas, TEN)
    assert [r.load for r in replicas] == [4200, 4200]


def test_a_gain_below_a_thousandth_of_the_mean_is_not_worth_an_exchange() -> None:
    replicas = [replica([10_091, 9], first=0), replica([9900], first=10)]
    _search(replicas, TEN)
    assert [r.load for r in replicas] == [10_100, 9900]
    replicas = [replica([10_090, 10], first=0), replica([9900], first=10)]
    _search(replicas, TEN)
    assert sorted(r.load for r in replicas) == [9910, 10_090]


def test_there_are_at_most_eight_exchanges_per_replica() -> None:
    replicas = [replica([1] * 100, first=0), replica([], first=100)]
    _search(replicas, TEN)
    assert [r.load for r in replicas] == [84, 16], "an exchange moves one piece"


def replicas_with_a_host(num_others: int) -> list[_Replica]:
    """Return replicas in the ascending order of their loads, of which only the last but one can take anything: a row of
    the last one's group, because it encodes the same images."""
    group = work_group(0, [(1, 100)] * 5, (16, 2000))
    fullest, host = _Replica([Piece(group=group, rows=(0, 1, 2, 3))]), _Replica([Piece(group=group, rows=(4,))])
    return [*(replica([300], first=1 + k) for k in range(num_others)), host, fullest]


def test_the_four_emptiest_replicas_are_tried_before_the_search_ends() -> None:
    # to a replica of 300 a row brings 2100, which would make it as full as 2400; the host has 2100 and gets 100
    replicas = replicas_with_a_host(3)
    _search(replicas, TEN)
    assert [r.load for r in replicas] == [300, 300, 300, 2200, 2300]
    assert [rows(r) for r in replicas[3:]] == [[(0, 4)], [(1, 2, 3)]]
    replicas = replicas_with_a_host(4)
    _search(replicas, TEN)
    assert [r.load for r in replicas] == [300, 300, 300, 300, 2100, 2400], "the host is the fifth"


def test_a_replica_does_not_exchange_with_itself() -> None:
    # the other replica cannot take anything: even 100 would make it as full as this one, which has 1210
    group = work_group(0, [(6, 100), (6, 1000)])
    first, second = (Piece(group=group, rows=(row,)) for row in (0, 1))
    with_image = Piece(group=work_group(1, [(3, 60)], (16, 50)), rows=(0,))
    replicas = [_Replica([first, second, with_image]), replica([1110], first=2)]
    _search(replicas, TEN)
    assert replicas[0].pieces == [first, second, with_image]


drawn_rows = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 100)), min_size=1, max_size=6)
drawn_groups = st.lists(
    st.tuples(drawn_rows, st.integers(0, 200)),
    min_size=1,
    max_size=8,
)


@given(drawn=drawn_groups, num_replicas=st.integers(1, 6))
def test_the_search_keeps_all_rows_and_true_loads_and_never_fills_the_fullest_further(
    drawn: list[tuple[list[tuple[int, int]], int]], num_replicas: int
) -> None:
    pieces = [
        piece
        for position, (of_group, shared) in enumerate(drawn)
        for piece in cut(work_group(position, of_group, (0, shared)), TEN)
    ]
    replicas = [_Replica(pieces[k::num_replicas]) for k in range(num_replicas)]
    before = max(r.load for r in replicas)
    _search(replicas, TEN)
    assert max(r.load for r in replicas) <= before
    assert [r.load for r in replicas] == [sum(costs(r)) for r in replicas]
    kept = [(piece.group.position, row) for r in replicas for piece in r.pieces for row in piece.rows]
    assert sorted(kept) == sorted((piece.group.position, row) for piece in pieces for row in piece.rows)
    assert all(piece.num_tokens <= 10 for r in replicas for piece in r.pieces)
