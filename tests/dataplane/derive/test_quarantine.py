"""Tests of the quarantine: media stay in it for good if their bytes are at fault, and for a while if the machine may
be."""

import pytest

from dataplane.core.refs import BadMedia
from dataplane.derive import quarantine
from dataplane.derive.quarantine import Quarantine
from tests.dataplane.shards import wait_until


def bad(name: str) -> BadMedia:
    return BadMedia(dataset="a", shard="a.tar", key=name, reason="torn", name=name)


def test_a_lasting_fault_stays_and_another_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "EXPIRY_S", 2.0)
    kept = Quarantine()
    kept.put(("torn", ()), bad("torn"))
    kept.put(("slow", ()), bad("slow"), is_lasting=False)
    assert kept.get(("slow", ())) == bad("slow") and len(kept) == 2
    wait_until(lambda: ("slow", ()) not in kept)
    assert kept.all() == [bad("torn")] and ("torn", ("PNG",)) not in kept


def test_the_oldest_are_forgotten_beyond_the_bound() -> None:
    kept = Quarantine(max_media=2)
    for name in ("one", "two", "three"):
        kept.put((name, ()), bad(name))
    assert [one.name for one in kept.all()] == ["two", "three"]
