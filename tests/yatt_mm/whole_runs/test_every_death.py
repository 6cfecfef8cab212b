"""Tests that kill one kind of process after the other, once in every phase of a run: each run goes on, and trains on
what a run without a fault trains on. At the end the seconds of every repair are shown as a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tables import show_seconds
from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs import kills
from tests.yatt_mm.whole_runs.conftest import Digits
from tests.yatt_mm.whole_runs.kills import PATTERNS, Kill
from yatt_mm.keeper.table import read_rows, table_path

pytestmark = [pytest.mark.alone, pytest.mark.faults, pytest.mark.timeout(1500)]

NUM_STEPS = 8
PHASES = (
    (1, "prompts"),
    (2, "rollout"),
    (3, "genrm"),
    (4, "train"),
    (5, "publish"),
    (6, "checkpoint"),
    (8, "eval"),
    (8, "export"),
)
"""(step, phase) in which a process is killed."""
REPLACED_UNSEEN = ("decode worker", "reward worker")
"""Workers that are replaced by those that give them work; nothing is written down of it."""

seconds: dict[str, dict[str, float]] = {}
"""[role][phase] the seconds of the repair."""


def arguments(digits: Digits, name: str) -> list[str]:
    return digits.arguments(
        name,
        f"train.steps={NUM_STEPS}",
        "eval.every=4",
        "rollouts.keep=all",
        "dataplane.memory=128MiB",
        *runs.judge(digits.model),
    )


def trained_on(digits: Digits, name: str) -> list[tuple[int, int, str]]:
    """Return (step, position, response) of everything that a run trained on, in order."""
    return [
        (step, row["position"], row["response"])
        for step in range(1, NUM_STEPS + 1)
        for row in read_rows(table_path(digits.run(name), step))
        if row["split"] == "train" and row["advantage"] is not None
    ]


@pytest.fixture(scope="module")
def undisturbed(digits: Digits) -> runs.Finished:
    finished = runs.run(arguments(digits, "undisturbed"))
    assert finished.status == 0, finished.output
    return finished


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Show the seconds of all repairs at the end."""
    yield
    columns = ["what dies", *(phase for _, phase in PHASES)]
    show_seconds(request.config, "seconds of a repair", columns, seconds, num_digits=1)


# a node that dies six times in a minute is given up, so it has a run for each half of the phases
RUNS = [(role, part) for role in PATTERNS for part in ((PHASES[:4], PHASES[4:]) if role == "node" else (PHASES,))]


@pytest.mark.parametrize(("role", "phases"), RUNS, ids=lambda value: value if isinstance(value, str) else value[0][1])
def test_a_run_survives_the_death_of(
    role: str, phases: tuple[tuple[int, str], ...], undisturbed: runs.Finished, digits: Digits
) -> None:
    name = f"without_{role.replace(' ', '_')}_from_{phases[0][1]}"
    wanted = [Kill(role=role, step=step, phase=phase, after_s=0.05) for step, phase in phases]
    finished, done = kills.run(arguments(digits, name), wanted)
    assert finished.status == 0, finished.output
    assert finished.left_behind == []
    assert runs.curve(digits.folder, name) == runs.curve(digits.folder, "undisturbed"), finished.output
    assert trained_on(digits, name) == trained_on(digits, "undisturbed")
    assert done in (wanted, wanted[:-1]), "the run may be over before the last one"
    if role in REPLACED_UNSEEN:
        return
    path: Path = digits.run(name)
    found = [fault["seconds"] for fault in kills.faults(path)]
    assert len(found) in (len(done), len(done) - 1), found
    # a part that sleeps is missed when it is needed again, in a later phase
    seconds.setdefault(role, {}).update({phase: took for (_, phase), took in zip(phases, found)})
