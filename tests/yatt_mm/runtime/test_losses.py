"""Tests that find out what a fault took, with small actors of a real Ray."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from yatt_mm.common.progress import PROGRESS, STACK_SIGNAL, Done, progress_path, read_progress, signal_part
from yatt_mm.protocol.placement_model import Role, Unit
from yatt_mm.runtime import losses
from yatt_mm.runtime.cluster import ray_session
from yatt_mm.runtime.losses import died_controllers, is_gone, settle

pytestmark = pytest.mark.alone


class Member:
    """An engine or a rank that settles at once, or not at all."""

    def become(self, step: int | None, sleeps_s: float) -> None:
        self._step = step
        self._sleeps_s = sleeps_s

    def settle(self) -> int | None:
        time.sleep(self._sleeps_s)
        return self._step

    def pid(self) -> int:
        return os.getpid()

    def run(self, fails: bool) -> None:
        if fails:
            raise ValueError("it failed")
        time.sleep(self._sleeps_s)

    def open(self, path: str, log: str) -> int:
        with Path(log).open("a") as file:
            os.dup2(file.fileno(), 2)
        PROGRESS.open(Path(path))
        return os.getpid()


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="yatt-ray-", ignore_cleanup_errors=True) as folder:
        with ray_session(None, num_cpus=4, scratch=Path(folder), env={}):
            yield


LONG_S = 5.0
"""The seconds of sleep from which on a member is not used by the next test."""
idle: list[Any] = []
"""Members of earlier tests."""
used: list[Any] = []
"""Those of the present test that the next one may use."""


@pytest.fixture(autouse=True)
def members() -> Iterator[None]:
    yield
    for actor in used:
        with suppress(RayActorError):  # a test may have killed it
            ray.get(actor.pid.remote())
            idle.append(actor)
    used.clear()


def member(step: int | None = None, sleeps_s: float = 0.0) -> Any:
    remote: Any = ray.remote(num_cpus=0)(Member)
    actor = idle.pop() if idle else remote.remote()
    ray.get(actor.become.remote(step, sleeps_s))  # its process is there
    if sleeps_s < LONG_S:
        used.append(actor)
    return actor


def unit(role: Role, index: int) -> Unit:
    return Unit(role=role, pool=str(role), index=index, devices=(index,))


def ranks(*actors: Any) -> dict[Unit, Any]:
    return {unit(Role.TRAIN, number): actor for number, actor in enumerate(actors)}


def nothing(units: Collection[Unit]) -> dict[Unit, Done]:
    """Nothing is known of what units have done."""
    return {}


def test_ranks_whose_weights_have_the_same_step_stay() -> None:
    engine = unit(Role.ROLLOUT, 0)
    settled = settle(ranks(member(3), member(3)) | {engine: member()}, nothing, deadline_s=5)
    assert (settled.ranks_at, settled.lost, settled.silent) == (3, {}, frozenset())


@pytest.mark.parametrize("steps", [(3, 4), (3, None), (None, None)])
def test_ranks_whose_weights_differ_or_that_were_broken_off_do_not(steps: tuple[int | None, ...]) -> None:
    assert settle(ranks(*map(member, steps)), nothing, deadline_s=5).ranks_at is None


def test_a_rank_that_died_is_lost_and_nothing_waits_for_those_that_wait_for_it() -> None:
    dead = member(3)
    os.kill(ray.get(dead.pid.remote()), signal.SIGKILL)
    units = ranks(dead, member(3, sleeps_s=30))  # which takes long on a busy machine
    began_s = time.monotonic()
    settled = settle(units, nothing, deadline_s=20)
    assert time.monotonic() - began_s < 10 and settled.ranks_at is None
    (lost,) = settled.lost
    assert str(lost) == "training rank 0" and "was lost" in settled.lost[lost]


def test_ranks_are_waited_for_as_long_as_one_of_them_finishes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "OTHERS_S", 0.5)
    works, hangs = member(3, sleeps_s=2.5), member(3, sleeps_s=30)
    works_until_s = time.time() + 60

    def done(units: Collection[Unit]) -> dict[Unit, Done]:
        return {unit: Done(pid=0, started=0, count=0, last_s=min(time.time(), works_until_s)) for unit in units}

    assert settle(ranks(works), done, deadline_s=2.0).ranks_at == 3
    works_until_s = time.time()
    settled = settle(ranks(hangs), done, deadline_s=1.5)
    assert settled.ranks_at is None and len(settled.silent) == 1 and not settled.lost


def test_a_rank_that_waits_for_one_that_has_replied_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "OTHERS_S", 0.5)
    units = ranks(member(2), member(2, sleeps_s=30))
    began_s = time.monotonic()
    settled = settle(units, nothing, deadline_s=20)
    assert time.monotonic() - began_s < 10
    assert settled.ranks_at is None and [str(unit) for unit in settled.silent] == ["training rank 1"]


def test_ranks_that_wait_for_one_whose_update_failed_do_not_hang() -> None:
    settled = settle(ranks(member(None), member(3, sleeps_s=30)), nothing, deadline_s=20)
    assert (settled.ranks_at, settled.lost, settled.silent) == (None, {}, frozenset()), "its error ends the run"


def test_an_engine_that_does_not_fall_asleep_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "ENGINE_S", 1.0)
    engine = unit(Role.ROLLOUT, 1)
    settled = settle({engine: member(sleeps_s=30)}, nothing, deadline_s=5)
    assert settled.lost == {engine: "engine 1 did not end what it was doing in 1 s"}


def test_a_rank_that_replies_late_waits_for_no_one_if_it_still_finishes_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses, "OTHERS_S", 1.0)
    soon, later = member(2), member(2, sleeps_s=3)

    def done(units: Collection[Unit]) -> dict[Unit, Done]:
        return {unit: Done(pid=0, started=0, count=0, last_s=time.time()) for unit in units}

    assert settle(ranks(soon, later), done, deadline_s=20).ranks_at == 2, "it writes its part of a checkpoint"


def test_the_others_have_their_time_from_the_first_reply_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """It stands at 14 seconds when the first reply comes, and at 28 from then on."""

        now_s = 0.0

        def time(self) -> float:
            return self.now_s

        def wait(self, calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
            done, waiting = ray.wait(calls, timeout=timeout)
            if self.now_s:
                self.now_s = 28.0
            elif done:
                self.now_s = 14.0
            return done, waiting

    clock = Clock()
    monkeypatch.setattr(losses, "time", clock)
    monkeypatch.setattr(losses, "ray", clock)
    monkeypatch.setattr(losses, "OTHERS_S", 20.0)
    both = ranks(member(2), member(2, sleeps_s=0.5))
    assert settle(both, nothing, deadline_s=20).ranks_at == 2
    assert clock.now_s == 28.0


def test_controllers_that_had_died_are_named() -> None:
    controllers = [member(sleeps_s=0), member(sleeps_s=30), member(sleeps_s=30)]
    os.kill(ray.get(controllers[1].pid.remote()), signal.SIGKILL)
    runs = [controller.run.remote(c == 0) for c, controller in enumerate(controllers)]
    assert died_controllers(runs, within_s=3.0) == [1]
    assert is_gone(controllers[1], deadline_s=5) and not is_gone(controllers[0], deadline_s=20)


def test_a_process_that_hangs_writes_down_where(tmp_path: Path) -> None:
    path, log = progress_path("rank-0.log", tmp_path), tmp_path / "rank-0.log"
    hanging = member(sleeps_s=30)
    pid = ray.get(hanging.open.remote(str(path), str(log)))
    found = read_progress(path)
    assert found is not None and (found.pid, found.count) == (pid, 0)
    hanging.settle.remote()
    deadline = time.monotonic() + 20
    while "in settle" not in log.read_text() and time.monotonic() < deadline:
        signal_part("training rank 0", STACK_SIGNAL, tmp_path)
        time.sleep(0.1)
    assert "in settle" in log.read_text()
    ray.kill(hanging)
