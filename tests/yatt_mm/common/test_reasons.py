"""Tests of counting reasons."""

from __future__ import annotations

from yatt_mm.common.reasons import Reasons


def test_reasons_that_differ_in_names_and_numbers_are_one_and_the_first_is_told() -> None:
    reasons = Reasons()
    assert len(reasons) == 0
    for reason in (
        "truncated or corrupt PNG",
        "'a.png' cannot be read: No such file or directory (/data/a.png)",
        "'b.png' cannot be read: No such file or directory (/data/b.png)",
        "its prompt has 300 tokens; 200 are left",
    ):
        reasons.add(reason)
    assert reasons.commonest() == ("'a.png' cannot be read: No such file or directory (/data/a.png)", 2)
    assert len(reasons) == 4
