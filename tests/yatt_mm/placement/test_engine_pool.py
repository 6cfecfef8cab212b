"""Tests of the pool of engines: places, turns, and measured times, with numbers computed by hand."""

from __future__ import annotations

import pytest

from yatt_mm.placement.engine_pool import EnginePool
from yatt_mm.placement.engine_time import work_s


def make(num_engines: int = 2, room: int = 2) -> EnginePool:
    pool = EnginePool(num_engines=num_engines, requests_per_engine=room)
    for engine in range(num_engines):
        pool.wake(engine, now_s=0.0)
    return pool


def test_the_emptiest_engine_gets_the_next_request_until_all_are_full() -> None:
    pool = make()
    pool.want(0, 5, now_s=0.0)
    assert pool.grant({0}, now_s=0.0) == {0: [0, 1, 0, 1]}
    assert (pool.num_running, pool.num_waiting) == (4, 1)
    pool.finish(1, 1, num_ended=1, now_s=1.0)
    assert pool.grant({0}, now_s=1.0) == {0: [1]}


def test_controllers_take_turns_and_those_that_do_not_ask_are_passed_over() -> None:
    pool = make(room=3)
    for controller in range(3):
        pool.want(controller, 4, now_s=0.0)
    assert {c: len(engines) for c, engines in pool.grant({0, 2}, now_s=0.0).items()} == {0: 3, 2: 3}
    assert pool.num_waiting == 6


def on_two_hosts() -> EnginePool:
    """Return two engines and two controllers: each host has one of both."""
    pool = EnginePool(num_engines=2, requests_per_engine=3, is_near=lambda controller, engine: engine == controller)
    for engine in range(2):
        pool.wake(engine, now_s=0.0)
    return pool


def test_a_controller_that_asks_first_takes_no_engine_of_another_host() -> None:
    pool = on_two_hosts()
    pool.want(0, 5, now_s=0.0)
    assert pool.grant({0}, now_s=0.0) == {0: [0, 0, 0]}
    pool.want(1, 4, now_s=0.0)
    assert pool.grant({0, 1}, now_s=0.0) == {1: [1, 1, 1]}
    pool.finish(1, 1, num_ended=1, now_s=1.0)
    assert pool.grant({0, 1}, now_s=1.0) == {1: [1]}, "its own host waits for it"
    pool.finish(1, 1, num_ended=1, now_s=2.0)
    assert pool.grant({0, 1}, now_s=2.0) == {0: [1]}, "its own host has enough"
    pool.forget_requests(now_s=3.0)
    pool.want(0, 5, now_s=3.0)
    assert pool.grant({0}, now_s=3.0) == {0: [0, 0, 0]}, "another phase begins"


def test_a_controller_without_an_engine_of_its_host_uses_those_of_others_at_once() -> None:
    pool = on_two_hosts()
    pool.sleep(0, now_s=0.0)
    pool.want(0, 2, now_s=0.0)
    assert pool.grant({0}, now_s=0.0) == {0: [1, 1]}


def test_an_engine_that_rests_gets_nothing() -> None:
    pool = make()
    pool.sleep(0, now_s=0.0)
    pool.want(0, 3, now_s=0.0)
    assert pool.grant({0}, now_s=0.0) == {0: [1, 1]}


def test_times_are_integrals_over_what_engines_had() -> None:
    pool = make()
    pool.want(0, 3, now_s=0.0)
    pool.grant({0}, now_s=0.0)  # 2 on engine 0, 1 on engine 1
    pool.finish(0, 2, num_ended=2, now_s=4.0)
    pool.sleep(0, now_s=6.0)
    times = pool.times(now_s=10.0)
    assert times.held_s == 6 + 10
    assert times.active_s == 4 + 10
    assert times.filled_s == pytest.approx(4 * 1.0 + 10 * 0.5)
    assert times.any_active_s == 10
    assert times.crowded_s == 0, "nothing waited"
    assert pool.num_ended == 2


def test_engines_are_crowded_while_requests_wait_for_one() -> None:
    pool = make()
    pool.want(0, 5, now_s=0.0)
    pool.grant({0}, now_s=0.0)  # 2 on each engine, 1 waits
    pool.finish(1, 1, num_ended=1, now_s=3.0)
    pool.grant({0}, now_s=3.0)
    pool.finish(0, 2, num_ended=2, now_s=4.0)
    times = pool.times(now_s=10.0)
    assert times.crowded_s == 2 * 3.0
    assert work_s(times, is_rollout=True, is_replacing=False) == times.active_s == 4 + 10
    assert work_s(times, is_rollout=True, is_replacing=True) == (times.filled_s + 2 * 3.0) / 2


def test_a_new_phase_begins_with_nothing_under_way() -> None:
    pool = make()
    pool.want(0, 9, now_s=0.0)
    pool.grant({0}, now_s=0.0)
    pool.forget_requests(now_s=1.0)
    assert (pool.num_running, pool.num_waiting) == (0, 0)
