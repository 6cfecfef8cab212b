"""Tests that the named changes of the product can still be made, and their tests run: both are where they were."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.all_named import ALL_NAMED
from tests.mutation.named import Named

ROOT = Path(__file__).parents[2]
for_every_change = pytest.mark.parametrize("one", ALL_NAMED, ids=lambda one: one.claim)


@for_every_change
def test_the_text_that_is_changed_stands_in_one_place(one: Named) -> None:
    assert (ROOT / one.path).read_text().count(one.before) == 1


@for_every_change
def test_the_test_that_must_turn_red_exists(one: Named) -> None:
    file, _, name = one.test.partition("::")
    functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert not name or name.partition("[")[0] in functions


def test_the_docs_have_every_change() -> None:
    _, _, table = (ROOT / "docs" / "testing.md").read_text().partition("| what the test claims |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    assert sorted(row.split(" | ")[0].removeprefix("| ") for row in rows) == sorted(one.claim for one in ALL_NAMED)
