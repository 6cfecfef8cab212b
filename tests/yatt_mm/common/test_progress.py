"""Tests that a signal to a part of the run reaches its process, and no other one that has its number later."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.dataplane.shards import wait_until
from yatt_mm.common.progress import LAYOUT, progress_path, read_progress, signal_part

PART = "training rank 0"
PROGRAM = """
import sys, time
from pathlib import Path
from yatt_mm.common.progress import PROGRESS
PROGRESS.open(Path(sys.argv[1]))
PROGRESS.tick()
time.sleep(60)
"""


def test_only_the_process_that_wrote_the_file_gets_the_signal(tmp_path: Path) -> None:
    path = progress_path("rank-0.log", tmp_path)
    signal_part(PART, signal.SIGKILL, tmp_path)  # there is none yet
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)]) as process:
        try:
            wait_until(lambda: (found := read_progress(path)) is not None and found.count == 1, 60)
            found = read_progress(path)
            assert found is not None and found.pid == process.pid
            path.write_bytes(
                LAYOUT.pack(process.pid, found.started - 1, 1, found.last_s)
            )  # an earlier one of its number
            signal_part(PART, signal.SIGKILL, tmp_path)
            assert process.poll() is None
            path.write_bytes(LAYOUT.pack(process.pid, found.started, 1, found.last_s))
            signal_part(PART, signal.SIGKILL, tmp_path)
            assert process.wait(60) == -signal.SIGKILL
            signal_part(PART, signal.SIGKILL, tmp_path)  # it has ended
        finally:
            process.kill()
