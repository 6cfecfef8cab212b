"""Tests of group-relative advantages against values that were worked out by hand."""

import math

import pytest

from yatt_mm.algorithms.advantages import group_advantages, has_signal


def test_rewards_are_centred_and_divided_by_the_sample_standard_deviation() -> None:
    # the mean is 0.5; the sum of squares 1 is divided by 4 - 1, so the standard deviation is 1 / sqrt(3)
    high = math.sqrt(3) / 2
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([high, -high, -high, high], abs=1e-5)


def test_each_row_gets_its_own_advantage() -> None:
    assert group_advantages([4.0, 1.0, 1.0], normalize_std=False) == [2.0, -1.0, -1.0]
    assert group_advantages([4.0, 1.0, 1.0]) == pytest.approx([2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)])


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    assert group_advantages([0.3, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert group_advantages([0.1 + 0.2, 0.1 + 0.2]) == [0.0, 0.0]


def test_a_group_has_signal_if_any_two_rewards_differ() -> None:
    assert has_signal([0.0, 0.0, 1e-9]) and has_signal([-1.0, 1.0])
    assert not has_signal([0.3, 0.3]) and not has_signal([0.3])


def test_rewards_that_differ_by_noise_alone_have_no_signal() -> None:
    noise = [0.0004, 0.0006, 0.0001]
    assert not has_signal(noise, min_range=0.001) and has_signal([*noise, 0.0012], min_range=0.001)
    assert not has_signal([0.25, 0.5], min_range=0.25), "the range itself is still noise"
    assert group_advantages(noise, min_range=0.001) == [0.0, 0.0, 0.0]
    assert group_advantages([0.0, 0.5], min_range=0.001) == group_advantages([0.0, 0.5])
