"""The code that benchmarks of whole runs share: arguments, the run itself, and its metrics."""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

from rich.console import Console
from rich.table import Table

from yatt_mm.config.run_config import load_config
from yatt_mm.runtime.launch import launch


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every benchmark takes."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", action="store_true", help="print the rows as one JSON object in the last line")
    return arguments


def run_and_read(config: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Train in a temporary folder, or in `run.dir` if the overrides set it. Return the records of metrics.jsonl."""
    with tempfile.TemporaryDirectory(prefix="yatt-bench-") as folder:
        settings = load_config(config, [f"run.dir={folder}", *overrides])
        launch(settings, console=Console(stderr=True))
        lines = (settings.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def show(title: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print a table for people; with `as_json` also a last line for programs."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{row[c]:,.4g}" if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns))
    Console(stderr=as_json).print(table)
    if as_json:
        print(json.dumps({"rows": rows}))
