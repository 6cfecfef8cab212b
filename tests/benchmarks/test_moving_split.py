"""Tests the comparison of the moving split with the best fixed one, run as a user runs it."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.moving_split import main


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[dict[str, float]]:
    monkeypatch.setattr(sys, "argv", ["moving_split", "--json", "--processes", "1", *argv])
    main()
    rows: list[dict[str, float]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return rows


@pytest.mark.parity
def test_workloads_are_told_one_by_one_or_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("--kind", "wide", "--first", "3", "--num", "2")
    each = run(capsys, monkeypatch, "--each", *chosen)
    assert [row["seed"] for row in each] == [3, 4]
    whole, *parts = run(capsys, monkeypatch, *chosen)
    assert whole["num"] == 2 == sum(part["num"] for part in parts)
    assert whole["worst_ratio"] == max(row["ratio"] for row in each)
    assert whole["within_5_percent"] == sum(row["ratio"] <= 1.05 for row in each)
