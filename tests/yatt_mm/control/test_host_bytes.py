"""Tests of the metrics of what hosts send to each other: what has no kind is control."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dataplane.core.errors import NodeUnavailableError
from yatt_mm.common.host_progress import HostProgress
from yatt_mm.control import host_bytes
from yatt_mm.control.host_bytes import HostBytes
from yatt_mm.protocol.step_meter import StepMeter, merge


class Nodes:
    """A fake of the client of all nodes."""

    def __init__(self, *fetched: tuple[int, int]) -> None:
        """`fetched`: what the nodes have fetched at each question: all bytes, and those of plain objects."""
        self.fetched = list(fetched)

    def total(self, names: Sequence[str]) -> dict[str, int]:
        if not self.fetched:
            raise NodeUnavailableError("it is away")
        return dict(zip(names, self.fetched.pop(0), strict=True))


class Workers:
    def on_my_ranks(self, method: str) -> list[dict[str, int]]:
        assert method == "take_sent_bytes"
        return [{"gradients": 100, "weights": 5}, {"gradients": 50}]


def metrics_of(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, sent: Sequence[int | None]) -> dict[str, float]:
    agents = tuple(SimpleNamespace(take_sent_bytes=SimpleNamespace(remote=lambda: None)) for _ in sent)
    monkeypatch.setattr(host_bytes, "wait_all", lambda calls, **_: list(sent))
    team = SimpleNamespace(progress=HostProgress(agents=agents))
    counted, meter = HostBytes(cast(Any, team), cast(Any, nodes), cast(Any, Workers())), StepMeter()
    if not nodes.fetched:
        nodes.fetched.append((70, 0))
    counted.add(meter)
    record = merge([meter])
    return record | counted.rest(record, nodes.total(counted.of_nodes) if agents else {})


def test_what_hosts_sent_besides_media_rollouts_and_ranks_is_control(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics_of(Nodes((1000, 10), (1070, 30)), monkeypatch, [200, 60]) == {
        "hosts/gradients_bytes": 150,
        "hosts/weights_bytes": 5,
        "hosts/media_bytes": 50,
        "hosts/rollouts_bytes": 20,
        "hosts/control_bytes": 260 - 150 - 5 - 70,
    }


def test_a_node_that_was_started_again_counts_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes in (Nodes((1000, 10), (70, 0)), Nodes()):
        found = metrics_of(nodes, monkeypatch, [200, 60])
        assert (found["hosts/media_bytes"], found["hosts/rollouts_bytes"]) == (70, 0)


def test_without_the_kernels_list_control_is_left_out_and_on_one_host_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "hosts/control_bytes" not in metrics_of(Nodes((0, 0), (7, 0)), monkeypatch, [200, None])
    assert metrics_of(Nodes((0, 0), (7, 0)), monkeypatch, []) == {}
