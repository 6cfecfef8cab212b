"""Tests of what a step without a single group does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.yatt_mm.generation.fakes import Records
from yatt_mm.batching.step_batches import RoundOutcome
from yatt_mm.common.errors import DataError
from yatt_mm.generation.batch_filler import BatchFiller, FilledBatch


@pytest.mark.parametrize(
    ("deterministic", "judges_in_turn", "way"),
    [(True, False, "_in_rounds"), (False, True, "_in_rounds"), (False, False, "_in_a_stream")],
)
def test_a_step_without_a_group_is_an_error_that_says_why(
    deterministic: bool, judges_in_turn: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = RoundOutcome(is_full=True, num_prompts_used=16)
    empty = FilledBatch(kept=[], judged=[], outcome=outcome, num_rounds=1, dropped=[])
    monkeypatch.setattr(BatchFiller, way, lambda *_: empty)
    filler: Any = object.__new__(BatchFiller)
    rollout = SimpleNamespace(deterministic=deterministic)
    filler._config = SimpleNamespace(rollout=rollout, judges_in_turn=judges_in_turn)
    filler._rendezvous = SimpleNamespace(step=3, why_left_out=lambda: ". 16 samples were left out")
    wanted = "step 3 drew 16 prompts, and none of them can be used. 16 samples were left out"
    with pytest.raises(DataError, match=wanted):
        filler.fill()


def test_what_a_stream_of_responses_drops_before_the_judges_turn_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records()
    useless: Any = SimpleNamespace(name="group/3")
    filler: Any = object.__new__(BatchFiller)
    filler._client = records
    stream = SimpleNamespace(dropped=[useless])
    monkeypatch.setattr(BatchFiller, "_stream", lambda *_: (stream, ["a group"], None))
    monkeypatch.setattr(BatchFiller, "_judge_all", lambda *_: None)
    assert filler._in_turn("step 1") == ["a group"]
    assert records.released == ["group/3"]
