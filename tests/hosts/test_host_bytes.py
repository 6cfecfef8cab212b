"""What hosts send to each other, by kind, against the counters of their network devices."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest

from benchmarks.common.cluster import Cluster
from tests.hosts.conftest import SHORT
from tests.yatt_mm import runs
from tests.yatt_mm.whole_runs.conftest import Digits

pytestmark = pytest.mark.hosts

KINDS = ("media", "rollouts", "gradients", "weights", "control")
IDLE_S = 20.0
MOST_PER_GROUP = 2000
"""The bytes of control that one group may cost."""


STREAM = ("rollout.deterministic=false", "train.prompts_per_step=24")
"""Requests go to any engine that has room; in deterministic runs the place of a prompt decides. The prompts of each
controller have room on its own host: others would go to a free engine elsewhere, and their media with them."""


@dataclass(frozen=True)
class Counted:
    """What hosts sent from the evaluation before training to the end of the third step."""

    by_kind: dict[str, int]
    total: int
    """The bytes that passed the network devices, with all headers."""
    seconds: float
    records: list[dict[str, float]]


def counted(cluster: Cluster, digits: Digits, name: str, *overrides: str) -> Counted:
    seen: list[tuple[float, int]] = []

    def meanwhile() -> None:
        for step in (0, 3):
            cluster.wait_for_step(digits.run(name), step)
            seen.append((time.monotonic(), cluster.sent_bytes()))

    finished = cluster.run(digits.arguments(name, *SHORT, *overrides), meanwhile=meanwhile)
    assert finished.status == 0 and not finished.left_behind, finished.output
    records = [json.loads(line) for line in (digits.run(name) / "metrics.jsonl").read_text().splitlines()][1:]
    (began_s, before), (ended_s, after) = seen
    by_kind = {kind: int(sum(record[f"hosts/{kind}_bytes"] for record in records)) for kind in KINDS}
    print(json.dumps({**by_kind, "devices": after - before, "seconds": ended_s - began_s}))
    return Counted(by_kind=by_kind, total=after - before, seconds=ended_s - began_s, records=records)


def test_the_kinds_add_up_to_what_passed_the_devices(cluster: Cluster, shared_digits: Digits) -> None:
    idle = -cluster.sent_bytes()
    time.sleep(IDLE_S)
    idle_rate = (idle + cluster.sent_bytes()) / IDLE_S
    print(f"idle: {idle_rate:.0f} bytes a second")
    found = counted(cluster, shared_digits, "counted", *STREAM)
    kinds = found.by_kind
    assert sum(kinds.values()) == pytest.approx(found.total, rel=0.05)
    assert 0 < kinds["media"] <= 1.05 * sum(record["hosts/media_needed_bytes"] for record in found.records)
    assert kinds["weights"] < 10_000, "ranks meet before they write, and no weights cross"
    assert kinds["gradients"] > 0 and kinds["rollouts"] > 0
    num_groups = shared_digits.num_eval + sum(record["sampling/num_prompts_used"] for record in found.records)
    assert kinds["control"] - idle_rate * found.seconds < MOST_PER_GROUP * num_groups


def test_a_pipeline_has_the_numbers_of_one_host_and_its_weights_cross_once(
    cluster: Cluster, shared_digits: Digits, on_one_host: runs.Finished
) -> None:
    found = counted(cluster, shared_digits, "halves", "train.parallel.pp=2")
    model = (shared_digits.model / "model.safetensors").stat().st_size
    assert found.by_kind["weights"] == pytest.approx(3 * model, rel=0.05), "no host has all of them"
    assert sum(found.by_kind.values()) == pytest.approx(found.total, rel=0.05)
    assert on_one_host.status == 0, on_one_host.output
    one, two = (runs.curve(shared_digits.folder, name) for name in ("one", "halves"))
    assert len(one) == len(two)
    for mine, other in zip(one, two):  # the norm of a gradient is added up in another order
        assert mine == pytest.approx(other, rel=1e-4)
