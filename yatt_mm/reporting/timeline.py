"""`timeline.json`: which role held which device when, in the Chrome trace format (opens in Perfetto and
chrome://tracing).

It has one process per device with a row for rollout, one for training and one for each judge (judges may be awake
together), and one process for the controllers' phases. Times are microseconds since the epoch. The file is a complete
JSON array after every step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from yatt_mm.common.writing import writing
from yatt_mm.placement.device_ledger import LedgerSpan
from yatt_mm.protocol.placement_model import Role

TIMELINE_FILE = "timeline.json"
PHASES_PID = 1_000_000
"""The process number of the row of phases; no device has it."""
_END = "\n]\n"


class Timeline:
    """The timeline of a run: each call appends events to the file."""

    def __init__(self, path: Path, *, judges: Sequence[str], continues: bool) -> None:
        """`judges`: their names, in a fixed order. `continues`: keep what an earlier part of the run wrote."""
        self._path = path
        first, *others = judges or ("",)
        self._rows = {pool: row for row, pool in enumerate((Role.ROLLOUT, first, Role.TRAIN, *others))}
        self._named: set[tuple[int, int]] = set()
        if not (continues and path.exists() and path.read_text().endswith(_END)):
            with writing(path):
                path.write_text("[")
            self._append([_name("process_name", PHASES_PID, 0, "phases")])

    def add(self, spans: Iterable[LedgerSpan], phases: Iterable[tuple[str, float, float]]) -> None:
        """Add spans of devices, and phases as (name, begin, end) in seconds since the epoch."""
        events: list[dict[str, Any]] = []
        for span in spans:
            for device in span.devices:
                events += self._names(device, span)
                label = span.pool if span.state == "awake" else f"{span.pool} ({span.state})"
                event = _event(label, device, self._rows[span.pool], span.start_s, span.end_s)
                events.append({**event, "cat": str(span.role), "args": {"state": str(span.state), "unit": span.index}})
        events += [{**_event(name, PHASES_PID, 0, start, end), "cat": "phase"} for name, start, end in phases]
        self._append(events)

    def _names(self, device: int, span: LedgerSpan) -> list[dict[str, Any]]:
        row = self._rows[span.pool]
        new = [] if (device, row) in self._named else [_name("thread_name", device, row, span.pool)]
        if not any(device == named for named, _ in self._named):
            new.append(_name("process_name", device, row, f"device {device}"))
        self._named.add((device, row))
        return new

    def _append(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        with writing(self._path), self._path.open("r+") as file:
            text_end = file.seek(0, 2)
            is_new = text_end == 1
            file.seek(text_end if is_new else text_end - len(_END))
            file.write(("" if is_new else ",") + "\n" + ",\n".join(map(json.dumps, events)) + _END)


def _event(name: str, pid: int, tid: int, start_s: float, end_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": round(start_s * 1e6),
        "dur": round(end_s * 1e6) - round(start_s * 1e6),
    }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
