"""Tests that the timeline is a JSON array that Perfetto reads, complete after every step."""

from __future__ import annotations

import json
from pathlib import Path

from yatt_mm.placement.device_ledger import LedgerSpan
from yatt_mm.protocol.placement_model import Role, State
from yatt_mm.reporting.timeline import Timeline

JUDGES = ("strict", "kind")


def span(start_s: float, *, device: int = 0, role: Role = Role.ROLLOUT, pool: str | None = None) -> LedgerSpan:
    return LedgerSpan(
        role=role,
        pool=pool or str(role),
        index=device,
        devices=(device,),
        state=State.AWAKE,
        start_s=start_s,
        end_s=start_s + 0.5,
    )


def events(path: Path) -> list[dict]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_the_file_is_whole_after_every_addition(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, judges=JUDGES, continues=False)
    assert events(path) == []
    timeline.add([span(1.0)], [("rollout", 1.0, 2.0)])
    timeline.add([span(2.0, device=1, role=Role.TRAIN)], [])
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events(path) if e["cat"] != "phase"] == [
        ("rollout", 0, 1_000_000, 500_000),
        ("train", 1, 2_000_000, 500_000),
    ]


def test_a_resumed_run_adds_to_it_and_a_fresh_one_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    Timeline(path, judges=JUDGES, continues=False).add([span(1.0)], [])
    Timeline(path, judges=JUDGES, continues=True).add([span(2.0)], [])
    assert len(events(path)) == 2
    path.write_text(path.read_text()[:-5])  # cut off in the middle of a write
    Timeline(path, judges=JUDGES, continues=True).add([span(3.0)], [])
    assert len(events(path)) == 1


def test_judges_that_are_awake_together_have_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    pools = [(Role.ROLLOUT, "rollout"), (Role.TRAIN, "train"), *((Role.GENRM, judge) for judge in JUDGES)]
    Timeline(path, judges=JUDGES, continues=False).add([span(1.0, role=role, pool=pool) for role, pool in pools], [])
    assert len({event["tid"] for event in events(path)}) == len(pools)
    names = {e["tid"]: e["args"]["name"] for e in json.loads(path.read_text()) if e["name"] == "thread_name"}
    assert all(names[event["tid"]] == event["name"] for event in events(path))
