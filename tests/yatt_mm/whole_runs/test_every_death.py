"""Tests that kill one kind of process after the other, once in every phase of a run with two engines, two ranks and a
judge: what was killed is made again, and the run trains on what a run without a fault trains on."""

from __future__ import annotations

import threading
import zlib
from typing import Any

import pytest
from aiohttp import web

from tests.yatt_mm import runs
from tests.yatt_mm.genrm.chat_servers import serving, verdict, words_of
from tests.yatt_mm.whole_runs import deaths
from tests.yatt_mm.whole_runs.conftest import Digits
from tests.yatt_mm.whole_runs.kills import ELSEWHERE, PATTERNS

pytestmark = [pytest.mark.alone, pytest.mark.faults, pytest.mark.timeout(1500)]

ROLES = [role for role in PATTERNS if role not in ("node", *deaths.ENDS_ALL)]
# a node that dies six times in a minute is given up, so it has a run for each half of the phases
RUNS = [("node", deaths.PHASES[:4]), ("node", deaths.PHASES[4:]), *((role, deaths.PHASES) for role in ROLES)]
AWAY_S = 2.0
"""The time in seconds after which a judge's server is there again."""


@pytest.fixture(scope="module")
def undisturbed(digits: Digits) -> str:
    finished = runs.run(deaths.arguments(digits, "undisturbed"))
    assert finished.status == 0, finished.output
    return "undisturbed"


@pytest.mark.parametrize(("role", "phases"), RUNS, ids=lambda value: value if isinstance(value, str) else value[0][1])
def test_a_run_survives_the_death_of(
    role: str,
    phases: tuple[tuple[int, str], ...],
    undisturbed: str,
    digits: Digits,
    repair_seconds: dict[str, dict[str, float]],
) -> None:
    found = deaths.repairs(role, phases, digits, undisturbed)
    if found:
        repair_seconds.setdefault(role, {}).update(found)


def test_a_run_waits_for_a_server_that_dies(digits: Digits) -> None:
    """Test a judge elsewhere whose verdicts differ, but not from one question to the same question."""

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return verdict((1 + zlib.crc32(words_of(body).encode()) % 98) / 100)

    timers: list[threading.Timer] = []
    with serving(reply) as server:

        def dies() -> None:
            if not any(timer.is_alive() for timer in timers):  # or it is away already
                server.stop()
                timers.append(threading.Timer(AWAY_S, server.start))
                timers[-1].start()

        judge = ("reward.weight=1", f"reward.judges.away.url={server.url}", "reward.judges.away.model=judge")
        whole = runs.run(deaths.arguments(digits, "undisturbed_away", *deaths.SMALL, *judge))
        assert whole.status == 0, whole.output
        deaths.repairs(ELSEWHERE, deaths.PHASES, digits, "undisturbed_away", *deaths.SMALL, *judge, elsewhere=dies)
        for timer in timers:
            timer.join()
