"""Tests of splitting numbers into parts of nearly equal sums, with parts that were found by hand."""

from __future__ import annotations

import numpy as np
import pytest

from yatt_mm.training.largest_differencing import _merge, _spread, largest_differencing

WORKED = [
    # 8-7=1, 6-5=1, 4-1=3, 3-1=2
    ([8, 7, 6, 5, 4], 2, [[1, 3, 4], [0, 2]]),
    # the largest difference is not always that of two numbers: 10-3=7, 7-2=5, 5-2=3
    ([10, 3, 2, 2], 2, [[0], [1, 2, 3]]),
    # 8|7|0, then 8|7|6, which is nearly even: 5|4|0 are next, and 5+6, 4+7, 0+8
    ([8, 7, 6, 5, 4], 3, [[2, 3], [1, 4], [0]]),
    # equal numbers stay in their order
    ([5, 5], 2, [[0], [1]]),
    # 6-3=3; of three differences of 3, the two single numbers are older: 3-3=0, then 6|3 with 3|3
    ([6, 3, 3, 3], 2, [[0, 3], [1, 2]]),
    ([7], 3, [[0], [], []]),
    ([2, 9, 4], 1, [[0, 1, 2]]),
    ([], 2, [[], []]),
]


@pytest.mark.parametrize(("costs", "num_parts", "parts"), WORKED)
def test_parts_are_those_of_the_worked_example(costs: list[int], num_parts: int, parts: list[list[int]]) -> None:
    assert largest_differencing(costs, num_parts) == parts


def test_beyond_sixteen_numbers_per_part_the_largest_are_dealt_to_the_emptiest_part() -> None:
    # zeros change no sum, but push larger numbers out of the smallest 32, which are differenced
    assert parts_of([8, 7, 6, 5, 4], num_zeros=27) == ([1, 3, 4], [0, 2]), "32 numbers: 16 and 14, as above"
    # 8 7 6 are dealt: 8|13; then differences 5-5=0 and 4-0=4
    assert parts_of([8, 7, 6, 5, 4], num_zeros=30) == ([1, 2, 4], [0, 3])
    # all are dealt: 8|7, 8|13, 13|13, and the last 4 goes to one of two equal sums, the earlier part
    assert parts_of([8, 7, 6, 5, 4], num_zeros=32) == ([0, 3, 4], [1, 2])


def parts_of(costs: list[int], *, num_zeros: int) -> tuple[list[int], ...]:
    """Return the two parts of the numbers, without the zeros that follow them."""
    parts = largest_differencing([*costs, *[0] * num_zeros], 2)
    return tuple([i for i in part if i < len(costs)] for part in parts)


def test_dealt_parts_are_merged_before_smaller_numbers() -> None:
    # 50 numbers for 3 parts: the two nines are dealt, 9|9|0, which differ by more than any number that is left
    assert largest_differencing([9, 9, 1, *[0] * 47], 3) == [[1], [0], list(range(2, 50))]


def test_numbers_lose_no_bits_until_their_sum_has_more_than_62() -> None:
    assert largest_differencing([2**61 - 1, 2**61], 2) == [[1], [0]], "the second is larger, so it comes first"
    assert largest_differencing([2**61, 2**61 + 1], 2) == [[0], [1]], "they are halved, and equal then"


def test_the_spread_counts_parts_that_are_left_out_as_empty() -> None:
    assert _spread(np.array([9, 5, 2]), 3) == 7
    assert _spread(np.array([9, 5]), 3) == 9
    assert _spread(np.array([9]), 1) == 0


def test_merging_joins_the_largest_sums_with_the_smallest() -> None:
    # 5+0, 4+2, 1+6
    sums, order = _merge(np.array([5, 4, 1]), np.array([6, 2, 0]), 3)
    assert (sums.tolist(), order.tolist()) == ([7, 6, 5], [2, 1, 0])
    # with room for all sums, none are added
    sums, order = _merge(np.array([5, 4]), np.array([6]), 4)
    assert (sums.tolist(), order.tolist()) == ([6, 5, 4], [2, 0, 1])
    # three places for four sums: 5, 4+3 and 2
    sums, order = _merge(np.array([5, 4]), np.array([3, 2]), 3)
    assert (sums.tolist(), order.tolist()) == ([6, 5, 3], [1, 0, 2])
