"""Tests of whom a process asks what the parts of a run have done. Fakes replace agents and Ray's calls; the runs in
tests/hosts have real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from yatt_mm.common.host_progress import HostProgress
from yatt_mm.common.progress import LAYOUT, Done

LOST = ray.exceptions.ActorDiedError()


class Agent:
    """A fake agent: what is on its host, and for what it was asked."""

    def __init__(self, **counts: int) -> None:
        self.counts = counts
        self.asked: list[str] = []
        self.done = self

    def remote(self, names: Sequence[str]) -> Any:
        self.asked += names
        return lambda: [
            Done(pid=1, started=0, count=self.counts[name], last_s=0.0) if name in self.counts else None
            for name in names
        ]


def get(call: Callable[[], Any]) -> Any:
    return call()


def lost() -> Any:
    raise LOST


def test_only_the_host_of_a_part_is_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls, []))
    (tmp_path / "progress-rank-0").write_bytes(LAYOUT.pack(1, 0, 7, 0.0))
    first, second, third = Agent(**{"the rendezvous": 5}), Agent(**{"training rank 1": 3}), Agent()
    names = ["training rank 0", "training rank 1", "training rank 2", "the rendezvous"]
    hosts = {"training rank 0": 0, "training rank 1": 1, "training rank 2": 2}
    progress = HostProgress(agents=(first, second, third), hosts=hosts, folder=tmp_path)
    found = progress.of(names)
    assert [done and done.count for done in found] == [7, 3, None, 5]
    assert (first.asked, second.asked, third.asked) == (["the rendezvous"], ["training rank 1"], ["training rank 2"])
    monkeypatch.setattr(second, "remote", lambda names: lost)
    assert [done and done.count for done in progress.of(names)] == [7, None, None, 5], "who waits for it notices"
