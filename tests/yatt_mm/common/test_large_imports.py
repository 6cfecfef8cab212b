"""Tests of what the import of a large library does not load."""

from __future__ import annotations

import subprocess
import sys

LOADS = """
import importlib.util
from yatt_mm.common.large_imports import large_imports
with large_imports():
    try:
        import sklearn
    except ImportError:
        print("hidden")
    print(importlib.util.find_spec("scipy"))
import sklearn, scipy.optimize
with large_imports():
    import scipy.stats
print("there")
"""


def test_what_no_engine_needs_is_hidden_during_the_import_alone() -> None:
    done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["hidden", "None", "there"], done.stderr
