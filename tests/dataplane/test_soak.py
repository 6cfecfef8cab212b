"""Tests of a short soak, and of how its parent judges missing objects."""

import random
from typing import Any

import pytest
from rich.console import Console

from benchmarks.soak import soak
from benchmarks.soaking.catalog import Catalog


def put(name: str, started: float, **more: Any) -> dict[str, Any]:
    return {"ref": {"name": name}, "started": started, "is_durable": False, "scope": None} | more


def test_writing_reading_and_killing_give_no_wrong_byte_and_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until everything has happened, with fewer workers and more kills than the soak has."""
    short = {"NUM_WRITERS": 2, "NUM_READERS": 2, "CLIENT_KILL_S": 2.0, "FIRST_NODE_KILL_S": 3.0}
    for name, value in short.items():
        monkeypatch.setattr(f"benchmarks.soak.{name}", value)
    wanted = {"num_node_kills": 1, "num_client_kills": 3, "num_checks": 301, "num_puts": 31, "num_evicted": 1}
    wanted["max_spilled"] = 1
    report = soak(120, 1, 24 << 20, 16 << 20, 100, Console(stderr=True), wanted)
    assert report["findings"] == []
    missing = {name: report["counts"][name] for name, least in wanted.items() if report["counts"][name] < least}
    assert not missing, "did not happen often enough in two minutes"


def test_only_what_nothing_took_away_is_missed() -> None:
    catalog = Catalog(random.Random(0))
    for name in ("released", "lost", "scoped", "stolen"):
        catalog.note("w", "put", put(name, 0.0, scope="s" if name == "scoped" else None))
    catalog.note("w", "put", put("durable", 0.0, is_durable=True))
    catalog.note("w", "gone", ["released"])
    catalog.note("v", "put", put("after", float("inf")))
    assert catalog.writer_ended("w") == ["lost", "stolen"]
    catalog.note("w", "put", put("stolen", 0.0))
    for name in ("released", "scoped", "lost", "stolen", "durable", "after", "never"):
        catalog.note("r", "missing", {"name": name, "at": 1.0, "text": "gone"})
    found = catalog.judge()
    assert [text.split()[0] for text in found] == ["4", "stolen", "durable", "after", "never"]


def test_a_killed_node_excuses_what_it_held_and_was_not_durable() -> None:
    catalog = Catalog(random.Random(0))
    catalog.note("w", "put", put("plain", 0.0))
    catalog.note("w", "put", put("durable", 0.0, is_durable=True))
    catalog.node_killed()
    for name in ("plain", "durable"):
        catalog.note("r", "missing", {"name": name, "at": float("inf"), "text": "gone"})
    assert [text.split()[0] for text in catalog.judge()] == ["1", "durable"]
    assert catalog.durable() == [{"name": "durable"}]
