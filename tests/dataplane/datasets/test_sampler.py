"""Tests of the sampler's order: a bijection per epoch, exact shares, the same for any number of controllers, resumable
anywhere."""

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.core.errors import BadRequestError
from dataplane.datasets.mixing import next_source, whole_weights
from dataplane.datasets.permutation import permuted
from dataplane.datasets.sampler import Draw, Sampler, Source, Tail, load


def order(num: int, seed: int, epoch: int = 0) -> list[int]:
    return [permuted(place, num, seed, epoch) for place in range(num)]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 700), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_an_epochs_order_has_every_number_once(num: int, seed: int, epoch: int) -> None:
    assert sorted(order(num, seed, epoch)) == list(range(num))


@pytest.mark.parametrize("num", [2**31 - 1, 2**40 + 7])
def test_orders_of_sizes_that_fit_no_memory_stay_within_bounds_and_do_not_repeat(num: int) -> None:
    found = [permuted(place, num, 5, 0) for place in range(2000)]
    assert len(set(found)) == 2000 and all(0 <= number < num for number in found)
    assert 0.4 < sum(found) / (len(found) * num) < 0.6


def test_seeds_epochs_and_names_give_other_orders_and_the_same_key_the_same() -> None:
    orders = [order(100, seed, epoch) for seed in range(5) for epoch in range(5)]
    assert len({tuple(found) for found in orders}) == 25
    assert order(100, 3, 4) == order(100, 3, 4)
    assert permuted(0, 10**9, 0, 0, "a") != permuted(0, 10**9, 0, 0, "b")


@pytest.mark.parametrize("num", [2, 3, 7, 16, 30])
def test_every_number_comes_to_every_place_equally_often(num: int) -> None:
    num_epochs = 200 * num
    counts = Counter(
        (place, number) for epoch in range(num_epochs) for place, number in enumerate(order(num, 1, epoch))
    )
    expected = num_epochs / num
    chi_squared = sum(
        (counts[place, number] - expected) ** 2 / expected for place in range(num) for number in range(num)
    )
    freedom = (num - 1) ** 2
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5 + 8


def test_neighbours_do_not_stay_neighbours() -> None:
    found = order(10_000, 7)
    assert sum(abs(a - b) < 10 for a, b in pairwise(found)) < 60  # of 10,000 pairs 19 by chance


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_each_source_has_its_share_within_one_sample_at_every_moment(weights: list[int]) -> None:
    counts = [0] * len(weights)
    total = sum(weights)
    for drawn in range(1, 3 * total + 1):
        counts[next_source(counts, weights)] += 1
        assert all(abs(count * total - weight * drawn) < total for count, weight in zip(counts, weights, strict=True))
    assert counts == [3 * weight for weight in weights]


def test_weights_are_taken_as_they_are_written() -> None:
    assert whole_weights([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert whole_weights([1, 2.5]) == [2, 5]
    assert whole_weights([1e-3, 3]) == [1, 3000]


SOURCES = (
    Source(dataset="a", num_samples=10, weight=0.5),
    Source(dataset="b", num_samples=7, weight=0.3),
    Source(dataset="c", num_samples=1000, weight=0.2),
)


def test_a_mix_goes_through_each_dataset_by_its_own_epochs() -> None:
    one = sampler()
    draws = [draw for _ in range(20) for draw in one.next_batch()]
    assert Counter(draw.dataset for draw in draws) == {"a": 80, "b": 48, "c": 32}
    assert [draw.position for draw in draws] == list(range(160))
    for name, num in (("a", 10), ("b", 7)):
        indices = [draw.index for draw in draws if draw.dataset == name]
        for start in range(0, len(indices) - num, num):
            assert sorted(indices[start : start + num]) == list(range(num))
    assert [draw.epoch for draw in draws if draw.dataset == "a"] == [at // 10 for at in range(80)]


def sampler(tail: Tail = "wrap", batch_size: int = 8) -> Sampler:
    return Sampler(SOURCES if tail == "wrap" else SOURCES[:1], seed=3, batch_size=batch_size, tail=tail)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 12))
def test_resuming_with_another_number_of_controllers_goes_on_with_the_same_samples(
    world_before: int, world_after: int, num_before: int
) -> None:
    undisturbed = sampler()
    wanted = [undisturbed.next_batch() for _ in range(num_before + 5)]
    controllers = [sampler() for _ in range(world_before)]
    found = [union(controllers) for _ in range(num_before)]
    state = json.loads(json.dumps(controllers[-1].state()))
    controllers = [Sampler.from_state(state, SOURCES) for _ in range(world_after)]
    found += [union(controllers) for _ in range(5)]
    assert found == wanted


def union(controllers: list[Sampler]) -> list[Draw]:
    world = len(controllers)
    shares = [controller.next_batch(rank, world) for rank, controller in enumerate(controllers)]
    return sorted((draw for share in shares for draw in share), key=lambda draw: draw.position)


def test_the_state_is_a_few_numbers_that_do_not_grow() -> None:
    one = Sampler([Source(dataset="big", num_samples=10**12)], seed=1, batch_size=64)
    for _ in range(100):
        one.next_batch()
    state = one.state()
    assert state["sources"] == [
        {"dataset": "big", "num_samples": 10**12, "weight": 1.0, "epoch": 0, "cursor": 6400, "num_unused": 0},
    ]
    assert len(json.dumps(state)) < 200


def test_the_tail_of_an_epoch_wraps_or_is_dropped() -> None:
    wrap = Sampler(SOURCES[:1], seed=0, batch_size=4)
    assert [draw.epoch for _ in range(5) for draw in wrap.next_batch()] == [0] * 10 + [1] * 10
    drop = sampler("drop", 4)
    draws = [draw for _ in range(4) for draw in drop.next_batch()]
    assert [draw.epoch for draw in draws] == [0] * 8 + [1] * 8
    assert len({draw.index for draw in draws[:8]}) == 8
    assert Sampler.from_state(drop.state()).next_batch() == drop.next_batch()


def test_without_shuffling_samples_come_in_order() -> None:
    plain = Sampler(SOURCES[:1], seed=0, batch_size=10, shuffle=False)
    assert [draw.index for draw in plain.next_batch()] == list(range(10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampler([], seed=0, batch_size=1), "without sources"),
        (lambda: Sampler(SOURCES, seed=0, batch_size=0), "batch_size is 0"),
        (lambda: Sampler(SOURCES, seed=0, batch_size=4, tail="drop"), "several sources.*use 'wrap'"),
        (lambda: Sampler(SOURCES[:1], seed=0, batch_size=40, tail="drop"), "less than one batch of 40"),
        (lambda: Sampler(SOURCES[:1] * 2, seed=0, batch_size=4), "name a dataset twice: a, a"),
        (lambda: Sampler([Source(dataset="a", num_samples=0)], seed=0, batch_size=4), "a has 0 samples"),
        (lambda: Sampler([Source(dataset="a", num_samples=1, weight=0)], seed=0, batch_size=4), "weight of a is 0"),
        (lambda: sampler().next_batch(2, 2), "rank is 2 of world_size 2"),
        (lambda: Sampler.from_state({"seed": 1}), "no state of a sampler: KeyError"),
        (lambda: Sampler.from_state(sampler().state(), SOURCES[:2]), r"taken with a \(10 samples, weight 0.5\), b"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        make()  # type: ignore[operator]


def test_draws_of_several_datasets_are_loaded_in_their_order(node: EmbeddedNode, client: Client) -> None:
    sources = [Source(dataset=name, num_samples=client.ingest(name).num_samples) for name in ("good", "bad")]
    draws = Sampler(sources, seed=2, batch_size=6).next_batch()
    samples = load(client, draws)
    assert [sample.index for sample in samples] == [draw.index for draw in draws]
    assert {draw.dataset for draw in draws} == {"good", "bad"}
    for draw, sample in zip(draws, samples, strict=True):
        assert sample.shard.startswith(draw.dataset)


def test_the_sampler_needs_neither_numpy_nor_arrow() -> None:
    code = "import dataplane.datasets.sampler, sys; assert not {'numpy', 'pyarrow', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
