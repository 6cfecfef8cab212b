"""The faults of a run, for people: `runs/<name>/faults.jsonl`, a line for each."""

from __future__ import annotations

import json
import time
from pathlib import Path

from yatt_mm.common.writing import writing

FAULTS_FILE = "faults.jsonl"


class FaultLog:
    """Writes a line for each fault."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FAULTS_FILE

    def add(self, *, who: str, role: str, phase: str, step: int, why: str, done: str, seconds: float) -> None:
        """Write down who failed, in which phase of which step, why, what was done about it, and how long that took."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "who": who,
            "role": role,
            "phase": phase,
            "step": step,
            "why": why,
            "done": done,
            "seconds": round(seconds, 2),
        }
        with writing(self._path), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
