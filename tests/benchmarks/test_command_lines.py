"""Tests that every benchmark can be run by its path, as README and docs say, even if another package on this machine is
called `tests`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")  # the benchmarks import it

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text())


OURS = re.compile(r"^ *(from|import) (benchmarks|dataplane|examples|models|tests|yatt_mm)\b", re.MULTILINE)


def test_every_benchmark_looks_for_the_rest_beside_itself_first_and_tells_how_it_is_used(tmp_path: Path) -> None:
    assert len(COMMANDS) > 10
    texts = {path.name: path.read_text() for path in COMMANDS}
    assert [name for name, text in texts.items() if OURS.search(text) and "sys.path[0] =" not in text] == []
    running = {
        path.name: subprocess.Popen(
            [sys.executable, str(path), "--help"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for path in COMMANDS
    }
    told = {name: (process.communicate(timeout=300)[0], process.returncode) for name, process in running.items()}
    assert {name: said for name, (said, status) in told.items() if status} == {}
    assert all("usage:" in said for said, _ in told.values())
