"""Tests of cutting groups into pieces and packing pieces into microbatches, with packings that were found by hand."""

from __future__ import annotations

import pytest

from tests.yatt_mm.control.pieces import single, work_group
from yatt_mm.training.microbatches import Limits, Piece, cut, lay_out, num_microbatches

TEN = Limits(max_tokens=10)


def sized(sizes: list[int], costs: list[int], limit: str) -> tuple[list[Piece], Limits]:
    """Return pieces whose sizes are counted in `limit`, tokens or patches, and limits with a cap of ten on it."""
    if limit == "tokens":
        return [single(p, cost, tokens=size) for p, (size, cost) in enumerate(zip(sizes, costs))], TEN
    pieces = [single(p, cost, patches=size) for p, (size, cost) in enumerate(zip(sizes, costs))]
    return pieces, Limits(max_tokens=100, max_patches=10)


def places(microbatches: list[list[Piece]]) -> list[list[int]]:
    return [[piece.group.position for piece in micro] for micro in microbatches]


def test_cut_places_the_longest_rows_first_and_fills_pieces_up_to_the_cap() -> None:
    # 7 opens a piece, 5 another one, 3 is just what the first can still hold
    pieces = cut(work_group(0, [(3, 1), (5, 1), (7, 1)]), TEN)
    assert [piece.rows for piece in pieces] == [(0, 2), (1,)]
    assert [piece.num_tokens for piece in pieces] == [10, 5]


def test_cut_places_the_rows_that_it_was_given_alone() -> None:
    group = work_group(0, [(4, 1), (9, 1), (5, 1)])
    assert [piece.rows for piece in cut(group, TEN, rows=[0, 2])] == [(0, 2)]
    assert [piece.rows for piece in cut(group, TEN)] == [(1,), (0, 2)]


def test_a_row_and_images_of_exactly_the_caps_are_not_refused() -> None:
    group = work_group(0, [(10, 1), (10, 1)], (16, 1))
    assert [piece.rows for piece in cut(group, Limits(max_tokens=10, max_patches=16))] == [(0,), (1,)]


def test_a_piece_costs_its_rows_and_one_encoding() -> None:
    group = work_group(0, [(1, 10), (1, 20), (1, 40)], (4, 100))
    assert Piece(group=group, rows=(0, 2)).cost == 150


@pytest.mark.parametrize(("multiple_of", "num"), [(1, 3), (2, 4), (3, 3), (4, 4), (5, 5)])
def test_all_replicas_have_as_many_microbatches_as_the_fullest_rounded_up(multiple_of: int, num: int) -> None:
    three = [single(p, 1, tokens=6) for p in range(3)]
    limits = Limits(max_tokens=10, multiple_of=multiple_of)
    assert num_microbatches([three[:1], three, []], limits) == num


def test_replicas_without_work_have_one_microbatch() -> None:
    assert num_microbatches([[], []], TEN) == 1
    assert num_microbatches([[], []], Limits(max_tokens=10, multiple_of=2)) == 2


def test_pieces_are_counted_longest_first() -> None:
    # 7+3 and 6+4; in the given order, 3+6, 7 and 4 would be three microbatches
    assert num_microbatches([[single(p, 1, tokens=size) for p, size in enumerate([3, 6, 7, 4])]], TEN) == 2


@pytest.mark.parametrize(("max_patches", "num"), [(None, 1), (20, 1), (19, 2), (10, 2), (9, 3)])
def test_images_take_room_where_patches_have_a_cap(max_patches: int | None, num: int) -> None:
    # under a cap of 10 they are 6+4 and 6+4, under one of 9 they are 6, 6 and 4+4
    pieces = [single(p, 1, patches=size) for p, size in enumerate([6, 6, 4, 4])]
    assert num_microbatches([pieces], Limits(max_tokens=10, max_patches=max_patches)) == num


def test_the_evenest_microbatches_may_be_exactly_full() -> None:
    # differencing finds 7+5+4 and 8+6, three pieces and two; dealing them out would give 8+5+4 and 7+6
    pieces = [single(p, cost, tokens=10, patches=5) for p, cost in enumerate([8, 7, 6, 5, 4])]
    for limits in (Limits(max_tokens=30), Limits(max_tokens=30, max_patches=15)):
        assert places(lay_out(pieces, 2, limits)) == [[1, 3, 4], [0, 2]]


@pytest.mark.parametrize("limit", ["tokens", "patches"])
def test_pieces_that_do_not_fit_so_go_where_there_is_room_and_the_least_work(limit: str) -> None:
    # work 10 | 1+1+1 would be the evenest, but has sizes 6 | 5+3+3. The first 3 joins 5, where there is less work, and
    # the second has room only with 6. First fit would give 6+3 and 5+3 the other way round.
    pieces, limits = sized([6, 5, 3, 3], [10, 1, 1, 1], limit)
    assert places(lay_out(pieces, 2, limits)) == [[0, 3], [1, 2]]


def test_where_that_finds_no_room_first_fit_does() -> None:
    # evenest: 4 | 5+5+3+3, which is too long. By the least work: 5 | 5, 5+4 | 5, 5+4 | 5+3, and no room for 3.
    pieces, limits = sized([5, 5, 4, 3, 3], [1, 1, 5, 1, 1], "tokens")
    assert num_microbatches([pieces], limits) == 2
    assert places(lay_out(pieces, 2, limits)) == [[2, 3, 4], [0, 1]]


def test_microbatches_that_first_fit_leaves_over_are_empty() -> None:
    # another replica needs three. Evenest: work 10 | 10 | 1+1 with sizes 3 | 3 | 3+10. By the least work each 3 has a
    # microbatch of its own, and 10 has none. First fit: 3+3+3 and 10.
    pieces, limits = sized([3, 3, 3, 10], [10, 10, 1, 1], "patches")
    assert places(lay_out(pieces, 3, limits)) == [[], [0, 1, 2], [3]]


def test_a_replica_without_work_has_empty_microbatches() -> None:
    assert lay_out([], 3, TEN) == [[], [], []]
