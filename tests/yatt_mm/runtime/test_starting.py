"""Tests of what a start says while its parts become ready. The whole runs start real ones."""

from __future__ import annotations

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
