"""Whole runs over two hosts: the numbers of one host, nothing left behind, and what each of them lacks is named."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.cluster import Cluster
from tests.hosts.conftest import SHORT
from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs.conftest import Digits

pytestmark = pytest.mark.hosts


def test_a_run_over_two_hosts_has_the_numbers_of_one(
    cluster: Cluster, shared_digits: Digits, on_one_host: runs.Finished
) -> None:
    finished = cluster.run(shared_digits.arguments("two", *SHORT))
    assert finished.status == 0 and on_one_host.status == 0, finished.output
    assert not finished.left_behind, finished.left_behind
    assert runs.curve(shared_digits.folder, "two") == runs.curve(shared_digits.folder, "one")
    two, one = (shared_digits.run(name) / "hf" / "model.safetensors" for name in ("two", "one"))
    assert two.read_bytes() == one.read_bytes()
    hosts = ", ".join(f"{host.name} ({host.address})" for host in (cluster.hosts[0], cluster.hosts[1]))
    assert f"hosts {hosts}; what they send to each other is not encrypted" in finished.output
    logs = {log.name for log in (shared_digits.run("two") / "logs").iterdir()}
    assert {"engine-0.log", "engine-1.log", "rank-0.log", "rank-1.log", "controller-1.log"} <= logs


def test_the_judge_of_one_host_works_beside_the_policy_of_the_other(cluster: Cluster, shared_digits: Digits) -> None:
    judge = (*runs.judge(shared_digits.model), "placement.mode=partial_colocation", "placement.dynamic=false")
    finished = cluster.run(shared_digits.arguments("judged", *SHORT, "train.steps=2", *judge))
    assert finished.status == 0 and not finished.left_behind, finished.output
    lines = (shared_digits.run("judged") / "timeline.json").read_text().splitlines()[1:]
    spans = [event for line in lines if line.startswith("{") and (event := json.loads(line.rstrip(",")))["ph"] == "X"]
    used = {(event["pid"], event["cat"]) for event in spans if event.get("cat") in ("rollout", "genrm")}
    assert used >= {(0, "rollout"), (1, "genrm")}


def test_what_a_host_lacks_is_named_before_anything_heavy_starts(cluster: Cluster, shared_digits: Digits) -> None:
    other = cluster.hosts[1]
    arguments = shared_digits.arguments("lacking", *SHORT)
    shard = next(iter(sorted(shared_digits.folder.glob("train-*.tar"))))
    copy = shared_digits.folder / "copy.tar"
    copy.write_bytes(shard.read_bytes()[:-1] + b"1")
    other.run(["mount", "-t", "tmpfs", "none", str(shared_digits.model)])
    other.run(["mount", "--bind", str(copy), str(shard)])
    try:
        finished = cluster.run(arguments)
    finally:
        other.run(["umount", str(shared_digits.model)])
        other.run(["umount", str(shard)])
    assert finished.status == 1 and not finished.left_behind, finished.output
    assert f"host host1 ({other.address}): model.path {shared_digits.model} has no config.json there" in finished.output
    assert f"data set train: {shard} is not the same as on the launcher's host" in finished.output
    assert "ready after" not in finished.output


def test_a_folder_of_results_that_a_host_does_not_see_is_named(cluster: Cluster, shared_digits: Digits) -> None:
    finished = cluster.run(shared_digits.arguments("lacking", *SHORT, "run.dir=/tmp/results"))
    assert finished.status == 1, finished.output
    assert f"host host1 ({cluster.hosts[1].address}): it does not see the folder of run.dir, /tmp/results" in (
        finished.output
    )
    assert "ready after" not in finished.output
    assert not [left for left in finished.left_behind if left.startswith("host1")]


def test_tensor_parallel_ranks_on_two_hosts_are_refused(cluster: Cluster, shared_digits: Digits) -> None:
    finished = cluster.run(shared_digits.arguments("across", *SHORT, "train.parallel.tp=2"))
    assert finished.status == 2, finished.output
    assert "the nearest layout that does is tp 1 and pp 2" in " ".join(finished.output.split())
