"""Faults of another host in every phase of a run: it goes on, with the numbers of a run without a fault. At the end the
seconds that each fault took are shown as a table."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.cluster import Cluster
from tests.dataplane.shards import wait_until
from tests.hosts.conftest import cut_link
from tests.tables import show_seconds
from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs.conftest import Digits

pytestmark = [pytest.mark.hosts, pytest.mark.faults, pytest.mark.timeout(1600)]

PHASES = ((1, "prompts"), (2, "rollout"), (3, "train"), (4, "publish"), (5, "checkpoint"), (6, "eval"))
"""(step, phase) in which a fault begins."""
LONG = ("train.steps=6", "eval.every=6", "checkpoint.every=1", "faults.max_restarts=20", "controllers.deadline_s=120")
SHORT_S, LONG_S = 10.0, 80.0
"""The seconds for which a link is down: so short that nothing of the run is lost, and so long that Ray gives the host
up, which takes it more than a minute."""

seconds: dict[str, dict[str, float]] = {}
"""[fault][phase] the seconds from its beginning to the end of the step."""


@pytest.fixture(scope="module")
def undisturbed(shared_digits: Digits) -> runs.Finished:
    """The same run on one host."""
    finished = runs.run(shared_digits.arguments("undisturbed", *LONG))
    assert finished.status == 0, finished.output
    return finished


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Show the seconds of all faults at the end."""
    yield
    columns = ["what happens to the other host", *(phase for _, phase in PHASES)]
    show_seconds(request.config, "seconds from a fault to the end of its step", columns, seconds, num_digits=0)


def cut_shortly(cluster: Cluster, run_dir: Path) -> None:
    cut_link(cluster, run_dir, SHORT_S)


def cut_for_good(cluster: Cluster, run_dir: Path) -> None:
    """Cut the link until the run has lost the host. Ray there ends when it hears that it has been given up."""
    cut_link(cluster, run_dir, LONG_S)
    _start_ray_again(cluster)


def kill_raylet(cluster: Cluster, run_dir: Path) -> None:
    (raylet,) = (line for line in cluster.hosts[1].processes() if "raylet/raylet" in line.split(" ", 2)[1])
    os.kill(int(raylet.split()[0]), signal.SIGKILL)
    _start_ray_again(cluster)


def kill_host(cluster: Cluster, run_dir: Path) -> None:
    cluster.hosts[1].kill()
    cluster.hosts[1].start_up()
    cluster.start_ray(1)


def _start_ray_again(cluster: Cluster) -> None:
    """Start Ray on the other host, once the one before has ended there."""
    wait_until(lambda: not any("raylet/raylet" in line for line in cluster.hosts[1].processes()), LONG_S)
    cluster.start_ray(1)


FAULTS = {
    "its link is down for 10 s": cut_shortly,
    "its link is down until it is lost": cut_for_good,
    "its raylet is killed": kill_raylet,
    "it is killed": kill_host,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_goes_on_after(
    fault: str, cluster_with_phases: Cluster, phases: Path, shared_digits: Digits, undisturbed: runs.Finished
) -> None:
    cluster, name, begin = cluster_with_phases, fault.replace(" ", "_"), FAULTS[fault]
    phases.write_text("")
    seconds[fault] = {}

    def meanwhile() -> None:
        for step, phase in PHASES:
            wait_until(lambda wanted=f"{step} {phase} ": wanted in phases.read_text(), runs.DEADLINE_S)
            began = time.monotonic()
            begin(cluster, shared_digits.run(name))
            cluster.wait_for_step(shared_digits.run(name), step)
            seconds[fault][phase] = time.monotonic() - began

    finished = cluster.run(shared_digits.arguments(name, *LONG), meanwhile=meanwhile, deadline_s=1400)
    assert finished.status == 0, finished.output
    assert not [left for left in finished.left_behind if "/ray" not in left], "but for the host's other Ray"
    assert seconds[fault].keys() == {phase for _, phase in PHASES}, finished.output
    assert runs.curve(shared_digits.folder, name) == runs.curve(shared_digits.folder, "undisturbed")
