"""Tests that a loss of power at any moment of a save takes no committed checkpoint or begun step, and leaves no half of
one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.yatt_mm import runs
from tests.yatt_mm.training.power_loss import CALLS, FAULTS, NUM_STEPS, losses

pytestmark = pytest.mark.faults


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace writes down the system calls")
def test_at_every_moment_what_has_its_name_is_on_the_disk_and_what_is_committed_has_its_name(
    untied_folder: Path, tmp_path: Path
) -> None:
    root, trace = tmp_path / "root", tmp_path / "trace"
    root.mkdir()
    command = ["strace", "-f", "-y", "-s", "4096", "-e", f"trace={CALLS}", "-o", str(trace), sys.executable]
    command += ["-m", "tests.yatt_mm.training.power_loss", str(untied_folder), str(root)]
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert trace.read_text().count("fsync(") > 10 * NUM_STEPS, "the ranks were written down"
    found = losses(trace, root)
    assert found.keys() == FAULTS.keys(), "the planted faults are found, and nothing else"
    for folder in ("step_000003", "step_000004", "begun_000003"):
        assert any("may be lost" in problem for problem in found[folder]), found
    assert "step_000005 may be gone though it was committed" in found["step_000005"]
