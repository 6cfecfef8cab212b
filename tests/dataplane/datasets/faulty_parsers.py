"""Parsers with faults: code that runs in each parser process when it starts, in the place of a fault of a format's
library."""

import os
from pathlib import Path
from typing import Any

import pytest

from dataplane.datasets.formats.range_files import RangeFile

ROOT = Path(__file__).parents[3]
TABLE: dict[str, Any] = {"form": "parquet", "options": {"media": [], "drop": [], "optional": []}}
"""Arguments for the task that opens a table."""


def file_of(path: Path) -> RangeFile:
    """Return a file as it is now."""
    stat = path.stat()
    return RangeFile(str(path), stat.st_size, str(stat.st_mtime_ns))


def hook(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Let each parser run this code when it starts: it stands for a fault of a format's library."""
    (folder / "hooks").mkdir()
    (folder / "hooks" / "sitecustomize.py").write_text(
        "import sys\nif 'dataplane.datasets.parsing.process_main' in ' '.join(sys.orig_argv):\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'hooks'}{os.pathsep}{ROOT}")


FAULT = """
import json, os, time
from dataplane.datasets.parsing.tasks import Tasks
real = Tasks._run
def run(self, task, file, arguments):
    if "bad" in file.path and task.endswith("rows"):
        {fault}
    return real(self, task, file, arguments)
Tasks._run = run
"""
