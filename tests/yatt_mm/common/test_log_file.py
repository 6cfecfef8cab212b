"""Tests of log files: the output of a process and its children goes there, and errors name them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from yatt_mm.common.log_file import logs_of

PRINTS = """
import os, sys
from pathlib import Path
from yatt_mm.common.log_file import write_output_to
print("before")
write_output_to(Path(sys.argv[1]))
print("printed")
print("warned", file=sys.stderr)
sys.stdout.flush()
os.system("echo said by a child")
"""


def test_the_output_of_a_process_and_of_its_children_is_appended(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine-0.log"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PRINTS, str(log)], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("before\n", "")
    lines = log.read_text().splitlines()
    assert sorted(lines) == sorted(["printed", "warned", "said by a child"] * 2)
    assert lines.index("said by a child") == 2, "after what was printed before"


def test_an_error_leads_to_the_logs_of_those_that_it_names(tmp_path: Path) -> None:
    for name in ("engine-1", "engine-12", "judge-tiny-1", "rank-0", "reward-3", "controller-2", "node"):
        (tmp_path / f"{name}.log").write_text("a line")
    (tmp_path / "rank-1.log").write_text("")

    def found(message: str) -> list[str]:
        return [log.name for log in logs_of(message, tmp_path)]

    assert found("engine 1 was lost during step 2") == ["engine-1.log"]
    assert found("engine 12 failed at step 2, and engine 1") == ["engine-12.log", "engine-1.log"]
    assert found("engine 1 of judge tiny failed at the verdicts of step 2") == ["judge-tiny-1.log"]
    assert found("controller 2 failed: WorkerError: training rank 0 did not finish update") == [
        "rank-0.log",
        "controller-2.log",
    ]
    assert found("reward worker 3 was lost") == ["reward-3.log"]
    assert found("the data-plane node at grpc://127.0.0.1:4815 ended") == ["node.log"]
    assert found("training rank 1 was lost, and training rank 7") == [], "one has printed nothing, one does not exist"
