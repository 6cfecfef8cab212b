"""Tests of what a start says while its parts become ready. The whole runs start real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from yatt_mm.protocol.placement_model import Role, Unit
from yatt_mm.runtime import starting
from yatt_mm.runtime.starting import _tell_when_ready


def test_each_group_of_parts_is_told_when_its_last_part_is_ready() -> None:
    told: list[str] = []
    engines = ["engine 0", "engine 1"]
    judges = ["engine 0 of judge tiny", "engine 1 of judge tiny"]
    ready = _tell_when_ready([engines, judges, ["training rank 0"]], told.append)
    for name, num_told in (("engine 1", 0), ("engine 0 of judge tiny", 0), ("training rank 0", 1), ("engine 0", 2)):
        ready(name)
        assert len(told) == num_told, name
    ready("engine 1 of judge tiny")
    assert [line.partition(": ready after ")[0] for line in told] == [
        "training rank 0",
        "2 engines",
        "2 engines of judge tiny",
    ]


@pytest.mark.parametrize("in_turns", [True, False])
def test_ranks_load_their_modules_while_engines_have_their_turn(
    in_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the order of calls, with actors that only note them; one after the other only GPUs start them."""
    seen: list[str] = []

    def actor(name: str) -> Any:
        def method(called: str) -> Any:
            return SimpleNamespace(remote=lambda *_: seen.append(f"{name} {called}"))

        return SimpleNamespace(start=method("start"), load_modules=method("load"))

    monkeypatch.setattr(starting, "wait_all", lambda calls, **_: seen.append(f"wait for {len(calls)}"))
    engine, rank = (Unit(role=role, pool=role.value, index=0, devices=(0,)) for role in (Role.ROLLOUT, Role.TRAIN))
    units = {engine: actor("engine"), rank: actor("rank")}
    starting.start(units, "file:///store", in_turns=in_turns, deadline_s=1, tell=lambda _: None)
    in_turn = ["rank load", "engine start", "wait for 1", "rank start", "wait for 1"]
    assert seen == (in_turn if in_turns else ["engine start", "rank start", "wait for 2"])
