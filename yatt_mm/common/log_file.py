"""The output of a process in a log file of its own, and the log files that an error is about."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROLES = (
    (re.compile(r"engine (\d+) of judge (\w+)"), r"judge-\2-\1.log"),
    (re.compile(r"engine (\d+)(?!\d| of judge)"), r"engine-\1.log"),
    (re.compile(r"training rank (\d+)"), r"rank-\1.log"),
    (re.compile(r"reward worker (\d+)"), r"reward-\1.log"),
    (re.compile(r"controller (\d+)"), r"controller-\1.log"),
    (re.compile(r"the keeper"), r"keeper.log"),
    (re.compile(r"the coordinator"), r"coordinator.log"),
    (re.compile(r"the rendezvous"), r"rendezvous.log"),
    (re.compile(r"data-plane node"), r"node.log"),
)
"""(what errors call a part of the run, the name of its log file)."""


def write_output_to(path: Path) -> None:
    """Append everything that this process and its later children print to a file, which is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)


def log_names(message: str) -> list[str]:
    """Return the names of the log files of the parts of the run that a text names."""
    names = [match.expand(name) for pattern, name in ROLES for match in pattern.finditer(message)]
    return list(dict.fromkeys(names))


def logs_of(message: str, folder: Path) -> list[Path]:
    """Return the log files of the parts of the run that an error's message names, if they exist and are not empty."""
    files = [folder / name for name in log_names(message)]
    return [file for file in files if file.is_file() and file.stat().st_size]
