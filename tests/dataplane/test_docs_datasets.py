"""Tests that the examples of docs/dataplane-datasets.md run as they are written."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "dataplane-datasets.md"


def test_every_example_on_data_sets_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parents[1]))
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == 2
    try:
        for block in blocks:
            exec(block, names)
    finally:
        if "node" in names:
            names["node"].stop()  # type: ignore[attr-defined]
