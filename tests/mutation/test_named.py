"""Tests that the named changes of the product can still be made: their texts are where they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.named import NAMED, Named
from tests.mutation.named_trouble import NAMED_TROUBLE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("one", (*NAMED, *NAMED_TROUBLE), ids=lambda one: one.claim)
def test_the_text_that_is_changed_stands_in_one_place(one: Named) -> None:
    assert (ROOT / one.path).read_text().count(one.before) == 1
