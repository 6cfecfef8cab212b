"""Tests of group-relative advantages against values that were worked out by hand."""

import math

import pytest

from yatt_mm.algorithms.advantages import BatchStatistics, batch_statistics, group_advantages, has_signal
from yatt_mm.algorithms.settings import AlgorithmSettings
from yatt_mm.algorithms.table import ALGORITHMS


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


REWARDS = [4.0, 1.0, 1.0, 2.0]
"""Rewards with the mean 2, and the squared differences 4, 1, 1 and 0, so that the standard deviation is sqrt(2)."""
BY_ALGORITHM = {
    "grpo": [2 / math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2), 0.0],
    "dr_grpo": [2.0, -1.0, -1.0, 0.0],
    "dapo": [2 / math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2), 0.0],
    "rloo": [4 - 4 / 3, 1 - 7 / 3, 1 - 7 / 3, 2 - 6 / 3],
    "reinforce_plus_plus": [(4 - 1.5) / 0.5, (1 - 1.5) / 0.5, (1 - 1.5) / 0.5, (2 - 1.5) / 0.5],
    "gspo": [2 / math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2), 0.0],
    "cispo": [2 / math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2), 0.0],
    "ppo": REWARDS,
}
BATCH = BatchStatistics(mean=1.5, std=0.5, range=3.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_has_its_hand_worked_advantages(name: str) -> None:
    settings = AlgorithmSettings(name=name, min_reward_range=0.001)
    advantage = ALGORITHMS[name].advantage
    assert advantage(REWARDS, BATCH, settings) == pytest.approx(BY_ALGORITHM[name], rel=1e-5)
    if name not in ("reinforce_plus_plus", "ppo"):
        assert advantage([0.3, 0.3004], None, settings) == [0.0, 0.0]


def test_the_batch_has_the_mean_and_the_deviation_of_its_tokens() -> None:
    # two tokens with reward 1, three with 0, one with 3: the mean is 5/6, the sum of squares
    # 2 * (1/6)^2 + 3 * (5/6)^2 + (13/6)^2 = 41/6 is divided by 5; the response without a token does not count
    found = batch_statistics([(1.0, 2), (0.0, 3), (3.0, 1), (9.0, 0)])
    assert found.mean == pytest.approx(5 / 6)
    assert found.std == pytest.approx(math.sqrt(41 / 6 / 5))
    assert found.range == 3.0


def test_the_order_of_the_batch_makes_no_difference_to_the_last_bit() -> None:
    responses = [(0.1 * k, k % 7 + 1) for k in range(50)]
    assert batch_statistics(responses) == batch_statistics(responses[::-1]) == batch_statistics(sorted(responses))


def test_a_group_of_equal_rewards_counts_against_the_batch_but_a_batch_of_equal_rewards_does_not_count() -> None:
    settings = AlgorithmSettings(name="reinforce_plus_plus", min_reward_range=0.001)
    advantage = ALGORITHMS["reinforce_plus_plus"].advantage
    assert advantage([1.0, 1.0], BATCH, settings) == pytest.approx([-1.0, -1.0], rel=1e-5)
    assert advantage([1.0, 1.0], batch_statistics([(1.0, 3), (1.0005, 2)]), settings) == [0.0, 0.0]
    assert batch_statistics([]) == batch_statistics([(1.0, 0)]) == BatchStatistics(mean=0.0, std=0.0, range=0.0)
