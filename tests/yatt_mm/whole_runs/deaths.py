"""Runs in every phase of which a process is killed, and what must be the same as in a run without a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.made_once import made_once
from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import kills
from tests.yatt_mm.whole_runs.kills import Kill
from yatt_mm.keeper.table import read_rows, table_path

if TYPE_CHECKING:
    from tests.yatt_mm.whole_runs.conftest import Digits

FEW = "few-000000.tar"
"""The shard with the held-out scans of these runs."""
NUM_STEPS = 5
PHASES = (
    (1, "prompts"),
    (1, "train"),
    (2, "rollout"),
    (2, "checkpoint"),
    (3, "publish"),
    (4, "genrm"),
    (4, "eval"),
    (5, "export"),
)
"""(step, phase) in which a process is killed. Every role is needed between two of them, so that the first one is missed
before the second one is killed."""
EVAL_EVERY = 4
ELSEWHERE = "judge elsewhere"
"""The role of a judge's server, which is no process of a run."""
NOT_WRITTEN_DOWN = (*kills.WORKERS, ELSEWHERE)
"""Workers, which are replaced by those that give them work, and a judge's server, which is waited for: no line of
`faults.jsonl` is about them."""
WRITTEN_AS = {
    "rollout actor": "rollout",
    "engine core": "rollout",
    "judge": "genrm",
    "rank": "train",
    "rendezvous": "launcher",
    "raylet": "launcher",
    "gcs": "launcher",
}
"""[role] its name in `faults.jsonl`, if that is another one."""
DEADLINE_S = 1200.0
"""The deadline of a run in seconds, which may start nine times."""
ORDER = (
    "prompts",
    "rollout",
    "genrm",
    "reference",
    "train",
    "publish",
    "eval",
    "report",
    "checkpoint",
    "export",
)
"""The phases in the order in which controllers come to them."""


def arguments(digits: Digits, name: str, *overrides: str) -> list[str]:
    """Return the arguments of a run that comes to every phase if the overrides have a judge."""
    return digits.arguments(
        name,
        f"train.steps={NUM_STEPS}",
        "train.prompts_per_step=16",
        "train.num_minibatches=2",
        f"eval.every={EVAL_EVERY}",
        f"data.eval={digits.folder}/{FEW}",
        "rollouts.keep=all",
        "dataplane.memory=128MiB",
        *overrides,
    )


def undisturbed(factory: pytest.TempPathFactory, digits: Digits, name: str, *overrides: str) -> str:
    """Make a run without a fault, once for all workers of pytest-xdist, and return its name."""
    finished = made_once(factory, name, lambda _: runs.run(arguments(digits, name, *overrides)))
    assert finished.status == 0, finished.output
    return name


def trained_on(digits: Digits, name: str) -> list[tuple[int, int, str]]:
    """Return (step, position, response) of everything that a run trained on, in order."""
    return [
        (step, row["position"], row["response"])
        for step in range(1, NUM_STEPS + 1)
        for row in read_rows(table_path(digits.run(name), step))
        if row["split"] == "train" and row["advantage"] is not None
    ]


def kills_of(
    *roles: str, phases: tuple[tuple[int, str], ...] = PHASES, act: Callable[[], None] | None = None
) -> list[Kill]:
    """Return one kill of each of the roles in each of the phases. act: see `Kill`."""
    return [Kill(role=role, step=step, phase=phase, after_s=0.05, act=act) for step, phase in phases for role in roles]


def repairs(
    name: str, wanted: list[Kill], digits: Digits, undisturbed: str, *overrides: str
) -> dict[str, dict[str, float]]:
    """Make a run with these kills, and check that it trained on what the run `undisturbed` trained on, and left nothing
    behind. Return [role][phase] the seconds of the repair."""
    finished, done = kills.run(arguments(digits, name, *overrides), wanted, deadline_s=DEADLINE_S)
    assert finished.status == 0, finished.output
    assert finished.left_behind == []
    assert runs.curve(digits.folder, name) == runs.curve(digits.folder, undisturbed), finished.output
    assert trained_on(digits, name) == trained_on(digits, undisturbed)
    roles = dict.fromkeys(kill.role for kill in wanted)
    assert done[:1] == wanted[:1] and {kill.role for kill in done} == set(roles), finished.output
    sure, found = ([kill for kill in some if kill.role not in kills.WHEN_NEEDED] for some in (wanted, done))
    assert found in (sure, sure[:-1]), "the run may be over before the last one"
    if ELSEWHERE in roles:
        assert "waiting: the server of judge away" in finished.output, finished.output
    written_down = [role for role in roles if role not in NOT_WRITTEN_DOWN]
    faults = kills.faults(digits.run(name)) if written_down else []
    assert {_written_as(role) for role in written_down} <= {fault["role"] for fault in faults}, faults
    seconds: dict[str, dict[str, float]] = {role: {} for role in written_down}
    for kill, fault in _repaired([kill for kill in done if kill.role in seconds], faults):
        seconds[kill.role][kill.phase] = fault["seconds"]
    unseen = [kill for kill in done[:-1] if kill.role in seconds and kill.phase not in seconds[kill.role]]
    assert unseen == [], ("the last one may not be needed any more", faults)
    return seconds


def _written_as(role: str) -> str:
    return WRITTEN_AS.get(role, role)


def _repaired(done: list[Kill], faults: list[dict[str, Any]]) -> Iterator[tuple[Kill, dict[str, Any]]]:
    """Yield each kill with its fault. Each start of the whole run is that of one kill. Other parts may sleep when they
    are killed, and are missed when they are needed again, in a later phase; and one repair may be that of two parts."""

    def moment(step: int, phase: str) -> tuple[int, int]:
        return step, ORDER.index(phase)

    starts = (fault for fault in faults if fault["role"] == "launcher")
    for kill in done:
        if _written_as(kill.role) == "launcher":
            later = starts
        else:
            since = moment(kill.step, kill.phase)
            later = (fault for fault in faults if moment(fault["step"], fault["phase"]) >= since)
        if fault := next(later, None):
            yield kill, fault
