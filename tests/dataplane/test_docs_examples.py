"""Tests that the examples of docs/dataplane-examples.md run as they are written."""

import re
from pathlib import Path

import pytest

from dataplane.server.actions import ACTIONS
from dataplane.server.do_exchange import EXCHANGES

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "dataplane-examples.md"


def test_every_example_by_verb_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")  # one example makes a tensor
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", EXAMPLES.read_text(), re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(block, names)
    finally:
        if "node" in names:
            names["node"].stop()  # type: ignore[attr-defined]


def test_every_verb_stands_in_an_example() -> None:
    blocks = re.findall(r"```(?:python|bash)\n(.*?)```", (DOCS / "dataplane.md").read_text(), re.DOTALL)
    text = "\n".join(blocks + re.findall(r"```python\n(.*?)```", EXAMPLES.read_text(), re.DOTALL))
    wanted = [*ACTIONS, *EXCHANGES, "get_flight_info", "get_schema", "list_flights", "list_actions", "do_put", "do_get"]
    assert [verb for verb in wanted if not re.search(rf"\b{verb}\b", text)] == []
