"""Tests of what the import of a large library does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
RANK_LOADS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from yatt_mm.training.actor import TrainActor
spec = SimpleNamespace(model_dir=sys.argv[1], cores=())
TrainActor(rank=0, spec=spec, parallel=None, dataplane_uri="").load_modules()
before = set(sys.modules)
from models.registry import load_family
load_family(Path(sys.argv[1]))
from transformers import AutoModelForImageTextToText
print(len(set(sys.modules) - before), sorted({"sklearn", "scipy"} & set(sys.modules)))
"""


def test_what_no_engine_needs_is_hidden_during_the_import_alone() -> None:
    done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["hidden", "None", "there"], done.stderr


def test_a_rank_loads_the_modules_of_its_family_before_its_turn_and_none_that_is_hidden(tiny_dir: Path) -> None:
    command = [sys.executable, "-c", RANK_LOADS, str(tiny_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["0", "[]"], done.stderr
