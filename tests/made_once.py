"""Results that are made once for all workers of pytest-xdist: the first one that needs one makes it, others wait."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

T = TypeVar("T")
DEADLINE_S = 900.0
"""The longest time in seconds that a worker waits for another one."""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """Return what `make(folder)` returned in the worker that came first. The folder is new then, and lasts as long as
    the session's temporary folder. If it raises, the next worker tries again."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, result = root / name, root / f"{name}.pickle"
    with FileLock(root / f"{name}.lock", timeout=DEADLINE_S):
        if not result.is_file():
            folder.mkdir(exist_ok=True)
            result.write_bytes(pickle.dumps(make(folder)))
    found: T = pickle.loads(result.read_bytes())
    return found
