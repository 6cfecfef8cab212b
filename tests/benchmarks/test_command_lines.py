"""Tests that every benchmark can be run by its path, as README and docs say, even if another package on this machine is
called `tests`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")  # the benchmarks import it

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text())


EVERY = """
import contextlib, io, json, runpy, sys
told = {}
for path in sys.argv[1:]:
    sys.argv, sys.path[0], said, status = [path, "--help"], "", io.StringIO(), None
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            status = end.code
    told[path] = [status, "usage:" in said.getvalue()]
print(json.dumps(told))
"""
"""Asks each benchmark for its help, one after another in one process, which imports torch once."""
OURS = re.compile(r"^ *(from|import) (benchmarks|dataplane|examples|models|tests|yatt_mm)\b", re.MULTILINE)


@pytest.mark.parity
def test_every_benchmark_looks_for_the_rest_beside_itself_first_and_tells_how_it_is_used(tmp_path: Path) -> None:
    assert len(COMMANDS) > 10
    texts = {path.name: path.read_text() for path in COMMANDS}
    assert [name for name, text in texts.items() if OURS.search(text) and "sys.path[0] =" not in text] == []
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("raise ImportError('another package of this name')")
    every = [sys.executable, "-c", EVERY, *map(str, COMMANDS)]
    done = subprocess.run(every, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {str(path): [0, True] for path in COMMANDS}
