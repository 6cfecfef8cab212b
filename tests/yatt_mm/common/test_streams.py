"""Tests of output after its reader has gone."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from pathlib import Path
from rich.console import Console
from yatt_mm.common.streams import outliving_streams
with outliving_streams():
    console = Console()
    console.print("ready")
    Path(sys.argv[1], "ready").touch()
    while not Path(sys.argv[1], "gone").exists():
        time.sleep(0.01)
    for _ in range(100):
        console.print("[bold]not read[/]")
        print("neither", file=sys.stderr)
Path(sys.argv[1], "done").touch()
sys.exit(75)
"""


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_a_program_goes_on_and_keeps_its_status_when_it_cannot_be_read_any_more(kind: str, tmp_path: Path) -> None:
    mine, its = pty.openpty() if kind == "terminal" else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdin=subprocess.DEVNULL, stdout=its, stderr=its
    )
    os.close(its)
    try:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
        os.close(mine)
        (tmp_path / "gone").touch()
        assert process.wait(60) == 75
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "done").exists()
