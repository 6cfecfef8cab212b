"""Tests that kill what `test_every_death.py` does not, once in every phase: it is started again, or everything is from
the newest checkpoint, and the run trains on what a run without a fault trains on. There is one device with one engine,
one rank, and a judge elsewhere, because starts take most of the time. The judge's server dies in every phase too."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.yatt_mm import runs
from tests.yatt_mm.genrm.chat_servers import ChatServer, serving, verdict, words_of
from tests.yatt_mm.whole_runs import deaths, test_every_death
from tests.yatt_mm.whole_runs.conftest import Digits
from tests.yatt_mm.whole_runs.kills import PATTERNS, WORKERS, Kill

pytestmark = [pytest.mark.alone, pytest.mark.faults, pytest.mark.timeout(1500)]


def in_halves(first: tuple[str, ...], second: tuple[str, ...]) -> list[Kill]:
    """Return kills of the first roles in the first half of the phases, and of the second ones in the other half."""
    half = len(deaths.PHASES) // 2
    return [
        *deaths.kills_of(*first, phases=deaths.PHASES[:half]),
        *deaths.kills_of(*second, phases=deaths.PHASES[half:]),
    ]


RUNS = {
    "rendezvous": deaths.kills_of("rendezvous"),
    "gcs and launcher": [
        *deaths.kills_of("gcs", phases=deaths.PHASES[1:2]),
        *deaths.kills_of("launcher", phases=deaths.PHASES[4:5]),
    ],
    "raylet": deaths.kills_of("raylet"),
    "workers then node": in_halves(WORKERS, ("node",)),
    "node then workers": in_halves(("node",), WORKERS),
    "keeper then coordinator": in_halves(("keeper",), ("coordinator",)),
    "coordinator then keeper": in_halves(("coordinator",), ("keeper",)),
}
"""[name of a run] what dies in it, and when. The whole run starts again after the death of one of the first four; as it
does so whichever of them dies, GCS and the launcher die in one phase each. These runs take longest, and come first, a
short one between two long ones: a worker of pytest-xdist takes a test when it begins the one before. A node that dies
six times in a minute is given up, so two runs share its phases."""
AWAY_S = 2.0
"""The time in seconds after which the server is there again."""


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    """A server whose verdicts differ, but not from one question to the same question."""

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return verdict((1 + zlib.crc32(words_of(body).encode()) % 98) / 100)

    with serving(reply) as server:
        yield server


@pytest.fixture(scope="module")
def small(server: ChatServer) -> tuple[str, ...]:
    """Overrides of the runs."""
    return (*runs.ONE_OF_EACH, f"reward.judges.away.url={server.url}", "reward.judges.away.model=judge")


@pytest.fixture(scope="module")
def undisturbed(small: tuple[str, ...], digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> str:
    return deaths.undisturbed(tmp_path_factory, digits, "undisturbed_small", *small)


def test_every_kind_of_process_dies_in_this_file_or_the_other_one() -> None:
    killed = {kill.role for wanted in RUNS.values() for kill in wanted}
    assert killed.isdisjoint(test_every_death.ROLES) and killed | set(test_every_death.ROLES) == PATTERNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_survives_the_death_of(
    name: str, small: tuple[str, ...], undisturbed: str, digits: Digits, repair_seconds: dict[str, dict[str, float]]
) -> None:
    found = deaths.repairs(f"without_{name.replace(' ', '_')}", RUNS[name], digits, undisturbed, *small)
    for role, seconds in found.items():
        repair_seconds.setdefault(role, {}).update(seconds)


def test_a_run_waits_for_a_server_that_dies(
    small: tuple[str, ...], undisturbed: str, digits: Digits, server: ChatServer
) -> None:
    timers: list[threading.Timer] = []

    def dies() -> None:
        if not any(timer.is_alive() for timer in timers):  # or it is away already
            server.stop()
            timers.append(threading.Timer(AWAY_S, server.start))
            timers[-1].start()

    deaths.repairs("server", deaths.kills_of(deaths.ELSEWHERE, act=dies), digits, undisturbed, *small)
    for timer in timers:
        timer.join()
