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

from tests.yatt_mm.genrm.chat_servers import ChatServer, serving, verdict, words_of
from tests.yatt_mm.whole_runs import deaths, test_every_death
from tests.yatt_mm.whole_runs.conftest import Digits
from tests.yatt_mm.whole_runs.kills import PATTERNS

pytestmark = [pytest.mark.alone, pytest.mark.faults, pytest.mark.timeout(1500)]

STARTED_AGAIN = {
    "rendezvous": deaths.PHASES,
    "raylet": deaths.PHASES,
    "gcs": deaths.PHASES[1::4],
    "launcher": deaths.PHASES[2::4],
}
"""[role] the phases in which it dies. The whole run starts again, whichever of these dies, so the last two have two
phases each. These runs take longest, and come first."""
HALVES = {"node": [deaths.PHASES[:4], deaths.PHASES[4:]]}
"""[role] the phases of each of its runs: a node that dies six times in a minute is given up."""
OTHERS = [role for role in PATTERNS if role not in (*test_every_death.ROLES, *STARTED_AGAIN)]
RUNS = [
    *STARTED_AGAIN.items(),
    *((role, phases) for role in OTHERS for phases in HALVES.get(role, [deaths.PHASES])),
]
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
    return (
        "placement.num_devices=1",
        "rollout.num_engines=1",
        "controllers.num=1",
        f"reward.judges.away.url={server.url}",
        "reward.judges.away.model=judge",
    )


@pytest.fixture(scope="module")
def undisturbed(small: tuple[str, ...], digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> str:
    return deaths.undisturbed(tmp_path_factory, digits, "undisturbed_small", *small)


@pytest.mark.parametrize(("role", "phases"), RUNS, ids=lambda value: value if isinstance(value, str) else value[0][1])
def test_a_run_survives_the_death_of(
    role: str,
    phases: tuple[tuple[int, str], ...],
    small: tuple[str, ...],
    undisturbed: str,
    digits: Digits,
    repair_seconds: dict[str, dict[str, float]],
) -> None:
    if found := deaths.repairs(role, phases, digits, undisturbed, *small):
        repair_seconds.setdefault(role, {}).update(found)


def test_a_run_waits_for_a_server_that_dies(
    small: tuple[str, ...], undisturbed: str, digits: Digits, server: ChatServer
) -> None:
    timers: list[threading.Timer] = []

    def dies() -> None:
        if not any(timer.is_alive() for timer in timers):  # or it is away already
            server.stop()
            timers.append(threading.Timer(AWAY_S, server.start))
            timers[-1].start()

    deaths.repairs(deaths.ELSEWHERE, deaths.PHASES, digits, undisturbed, *small, act=dies)
    for timer in timers:
        timer.join()
