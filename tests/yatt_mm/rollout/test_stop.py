"""Tests that a text that ends responses ends one that was cut off in the middle of this text."""

from __future__ import annotations

import numpy as np
import pytest

from yatt_mm.common.conversation import ask
from yatt_mm.protocol.group_record import GroupRecord, SampleRecord
from yatt_mm.protocol.rollout import PromptTask, SamplingSettings
from yatt_mm.rollout.continuation import begin_attempt
from yatt_mm.rollout.engine_types import Sampled

STOP = ("</answer>", "END")


def decode(token_ids: list[int]) -> str:
    """Return the text of tokens that are characters."""
    return "".join(map(chr, token_ids))


def record(text: str, reason: str) -> GroupRecord:
    sample = SampleRecord(
        token_ids=np.array([ord(letter) for letter in text]),
        logprobs=-np.arange(len(text), dtype=np.float32),
        policy_versions=np.zeros(len(text), np.int64),
        text=text,
        finish_reason=reason,
    )
    return GroupRecord(prompt_token_ids=np.array([5]), samples=(sample,))


@pytest.mark.parametrize(
    ("earlier", "new", "wanted", "reason"),
    [
        ("<answer>7</ans", "wer> and more", "<answer>7</answer>", "stop"),
        ("<answer>7</ans", "wer>", "<answer>7</answer>", "stop"),
        ("7 EN", "D, END", "7 END", "stop"),
        ("7 EN", "TRY", "7 ENTRY", "length"),
        ("7", " END", "7 END", "length"),  # the engine stops there by itself, and says why
    ],
)
def test_a_text_that_begins_before_the_cut_ends_the_response(earlier: str, new: str, wanted: str, reason: str) -> None:
    task = PromptTask(slot=0, conversation=ask("?"), media=(), num_samples=1, seed=0, name="a")
    attempt = begin_attempt(task, SamplingSettings(max_tokens=99, stop=STOP), [5], record(earlier, "abort"))
    assert attempt.request(()).stop == STOP
    sampled = Sampled(
        token_ids=tuple(map(ord, new)),
        logprobs=(-1.0,) * len(new),
        text=new,
        finish_reason="length",
        policy_versions=(1,) * len(new),
    )
    (sample,) = attempt.joined([sampled], decode).samples
    assert sample.text == decode(sample.token_ids.tolist()) == wanted
    assert len(sample.logprobs) == len(sample.policy_versions) == len(sample.token_ids)
    assert sample.finish_reason == ("stop" if wanted.endswith(STOP) else reason)
