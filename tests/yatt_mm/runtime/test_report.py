"""Tests of what people see of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from yatt_mm.runtime.report import Reporter


def shown(folder: Path, *records: dict[str, Any]) -> str:
    """Return what the console shows of these records."""
    console = Console(file=io.StringIO(), width=80)
    with Reporter(folder, num_steps=2, first_step=0, judges=(), console=console) as reporter:
        for record in records:
            reporter.take(record)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_fault_of_the_reward_function_is_shown_with_its_traceback(tmp_path: Path) -> None:
    text = shown(
        tmp_path,
        {
            "kind": "reward_fault",
            "function": "my.py:f",
            "what": "ValueError: [a]",
            "where": "my.py:3",
            "response": "[bold]7",
            "trace": '  File "my.py", line 3, in f\n    raise ValueError("[a]")\nValueError: [a]\n',
            "num_errors": 4,
            "num_responses": 20,
            "among": "step 1",
        },
        {"kind": "step", "step": 1, "reward/mean": 0.5, "reward/num_errors": 4.0},
        {"kind": "step", "step": 2, "reward/mean": 0.5, "reward/num_errors": 0.0},
    )
    wanted = (
        "reward failed on 4 of the 20 responses of step 1, which score 0: my.py:f on the response '[bold]7': "
        "ValueError: [a] (my.py:3)\n"
        '  File "my.py", line 3, in f\n    raise ValueError("[a]")\nValueError: [a]\n'
    )
    assert wanted in text
    assert "step    1  reward 0.500  failed 4\n" in text
    assert "step    2  reward 0.500\n" in text
