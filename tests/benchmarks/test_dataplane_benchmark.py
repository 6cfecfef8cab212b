"""Tests the comparison of data paths in a small version, and its last line, which programs read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"ours/resolve", "ours/put", "ours/write_seal", "ours/cross_node"}
LOCAL_PATHS = {"memcpy", "blake3", *OURS, "flight/do_get", "pickle/pipe"}


@pytest.mark.parity
def test_the_last_line_of_the_comparison_has_a_row_for_every_path_and_case() -> None:
    command = [sys.executable, "benchmarks/dataplane.py", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert all(set(row) == {"path", "bytes", "count", "seconds"} for row in rows)
    assert all(row["bytes"] > 0 and row["count"] > 0 and row["seconds"] > 0 for row in rows)
    assert {row["path"] for row in rows} >= LOCAL_PATHS
    for path in LOCAL_PATHS:
        assert {row["count"] for row in rows if row["path"] == path} >= {64, 4, 16}
