"""Faults of other hosts: what can be made again there is, and the numbers stay; a lost host ends the run by name."""

from __future__ import annotations

import json
import os
import signal

import pytest

from benchmarks.common.cluster import Cluster
from tests.hosts.conftest import SHORT, cut_link
from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs.conftest import Digits

pytestmark = pytest.mark.hosts

LINK_DOWN_S = 10.0


def kill_on(cluster: Cluster, number: int, pattern: str) -> None:
    """Kill the process of a host whose command line contains a text."""
    found = [line for line in cluster.hosts[number].processes() if pattern in line]
    assert found, cluster.hosts[number].processes()
    os.kill(int(found[0].split()[0]), signal.SIGKILL)


def test_parts_on_another_host_are_made_again_and_change_no_number(
    cluster: Cluster, shared_digits: Digits, on_one_host: runs.Finished
) -> None:
    def meanwhile() -> None:
        cluster.wait_for_step(shared_digits.run("killed"), 0)
        kill_on(cluster, 1, "dataplane serve --embedded")
        cluster.wait_for_step(shared_digits.run("killed"), 1)
        kill_on(cluster, 1, "ray::TrainActor")
        cluster.wait_for_step(shared_digits.run("killed"), 2)
        kill_on(cluster, 1, "VLLM::EngineCore")

    finished = cluster.run(shared_digits.arguments("killed", *SHORT), meanwhile=meanwhile)
    assert finished.status == 0 and not finished.left_behind, finished.output
    assert runs.curve(shared_digits.folder, "killed") == runs.curve(shared_digits.folder, "one")
    faults = [json.loads(line) for line in (shared_digits.run("killed") / "faults.jsonl").read_text().splitlines()]
    assert {"node", "train", "rollout"} <= {fault["role"] for fault in faults}, faults
    assert any("training rank 1" in fault["who"] for fault in faults)


def test_a_link_that_is_down_for_ten_seconds_changes_no_number(
    cluster: Cluster, shared_digits: Digits, on_one_host: runs.Finished
) -> None:
    def meanwhile() -> None:
        cluster.wait_for_step(shared_digits.run("cut"), 0)
        cut_link(cluster, shared_digits.run("cut"), LINK_DOWN_S)

    finished = cluster.run(shared_digits.arguments("cut", *SHORT), meanwhile=meanwhile)
    assert finished.status == 0 and not finished.left_behind, finished.output
    assert runs.curve(shared_digits.folder, "cut") == runs.curve(shared_digits.folder, "one")


def test_a_lost_host_ends_the_run_by_name_and_the_run_goes_on_when_it_is_back(
    cluster: Cluster, shared_digits: Digits, on_one_host: runs.Finished
) -> None:
    arguments = shared_digits.arguments("lost", *SHORT, "controllers.deadline_s=45")

    def meanwhile() -> None:
        cluster.wait_for_step(shared_digits.run("lost"), 2)
        cluster.hosts[1].kill()

    finished = cluster.run(arguments, meanwhile=meanwhile, num_seen=1)
    assert finished.status == 1 and not finished.left_behind, finished.output
    said = " ".join(finished.output.split())
    assert f"fault: host host1 ({cluster.hosts[1].address}) is lost" in said
    assert "Ray could not reserve 2 x 1 CPU, each on a host of its own, in 45 s; it has host0" in said
    cluster.hosts[1].start_up()
    cluster.start_ray(1)
    again = cluster.run([*arguments, "--resume"])
    assert again.status == 0 and not again.left_behind, again.output
    assert runs.curve(shared_digits.folder, "lost") == runs.curve(shared_digits.folder, "one")


@pytest.mark.faults
def test_a_run_goes_on_with_fewer_hosts_and_takes_one_back_when_it_returns(
    cluster: Cluster, shared_digits: Digits
) -> None:
    long = ("train.steps=16", "eval.every=0", "checkpoint.every=1")

    def meanwhile() -> None:
        cluster.wait_for_step(shared_digits.run("shrunk"), 2)
        cluster.hosts[1].kill()
        cluster.wait_for_step(shared_digits.run("shrunk"), 4)
        cluster.hosts[1].start_up()
        cluster.start_ray(1)

    shrink = ("faults.shrink=true", "controllers.deadline_s=45")
    finished = cluster.run(shared_digits.arguments("shrunk", *long, *shrink), meanwhile=meanwhile)
    assert finished.status == 0, finished.output
    assert not [left for left in finished.left_behind if "/ray" not in left], "but for the host's other Ray"
    said = " ".join(finished.output.split())
    assert f"fault: host host1 ({cluster.hosts[1].address}) is lost" in said
    assert "1 of 2 hosts are there; the run goes on with them (faults.shrink)" in said
    assert "1 more host(s) can be used: saving and starting again with them" in said
    undisturbed = runs.run(shared_digits.arguments("undisturbed", *long))
    assert undisturbed.status == 0, undisturbed.output
    mine, other = (runs.curve(shared_digits.folder, name) for name in ("shrunk", "undisturbed"))
    assert len(mine) == len(other) == 17 and mine[:2] == other[:2]
    for found, wanted in zip(mine, other):  # one rank adds up in another order than two
        assert found == pytest.approx(wanted, rel=1e-3)


def test_a_third_host_takes_part_when_a_run_goes_on(
    cluster_of_three: Cluster, shared_digits: Digits, on_one_host: runs.Finished
) -> None:
    cluster = cluster_of_three
    first = cluster.run(shared_digits.arguments("grown", *SHORT, "train.steps=2"))
    assert first.status == 0 and not first.left_behind, first.output
    second = cluster.run([*shared_digits.arguments("grown", *SHORT), "--resume"], num_hosts=3)
    assert second.status == 0 and not second.left_behind, second.output
    grown, one = (runs.curve(shared_digits.folder, name) for name in ("grown", "one"))
    assert grown[2].pop("eval/accuracy"), "its first part ended there"
    assert grown[:3] == one[:3] and grown[3] == pytest.approx(one[3], rel=1e-4)  # three ranks add up in another order
    assert "rank-2.log" in {log.name for log in (shared_digits.run("grown") / "logs").iterdir()}
