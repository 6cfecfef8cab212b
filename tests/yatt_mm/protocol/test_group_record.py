"""Tests that a group's record is read as it was written, and that other bytes are refused."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yatt_mm.protocol.group_record import GroupRecord, RecordError, SampleRecord, decode, encode


def sample_of(num_tokens: int, text: str) -> SampleRecord:
    return SampleRecord(
        token_ids=np.arange(num_tokens, dtype=np.int64),
        logprobs=-np.arange(num_tokens, dtype=np.float32) / 7,
        policy_versions=np.full(num_tokens, 3, dtype=np.int64),
        text=text,
        finish_reason="stop" if num_tokens % 2 else "length",
    )


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2**31), max_size=40),
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=9),
    lengths=st.lists(st.integers(0, 6), min_size=9, max_size=9),
)
def test_a_record_comes_back_as_it_was_written(prompt: list[int], texts: list[str], lengths: list[int]) -> None:
    samples = tuple(sample_of(length, text) for length, text in zip(lengths, texts, strict=False))
    record = GroupRecord(prompt_token_ids=np.array(prompt, dtype=np.int64), samples=samples)
    found = decode(np.frombuffer(encode(record), dtype=np.uint8))
    assert found.prompt_token_ids.tolist() == prompt
    assert len(found.samples) == len(samples)
    for wanted, sample in zip(samples, found.samples, strict=True):
        for name in ("token_ids", "logprobs", "policy_versions"):
            array = getattr(sample, name)
            assert array.dtype == getattr(wanted, name).dtype
            assert np.array_equal(array, getattr(wanted, name))
        assert (sample.text, sample.finish_reason) == (wanted.text, wanted.finish_reason)


def test_a_decoded_record_keeps_no_view_of_its_bytes() -> None:
    data = np.frombuffer(encode(GroupRecord(prompt_token_ids=np.arange(3), samples=(sample_of(4, "7"),))), np.uint8)
    found = decode(data)
    assert not np.shares_memory(found.samples[0].token_ids, data)
    assert found.samples[0].token_ids.flags.writeable


def test_foreign_bytes_are_refused_with_what_was_wanted() -> None:
    with pytest.raises(RecordError, match="wanted a group record"):
        decode(np.zeros(100, dtype=np.uint8))
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"x": [1]})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(RecordError, match=r"yatt_mm\.group\.1"):
        decode(np.frombuffer(sink.getvalue(), dtype=np.uint8))


def test_reading_records_needs_neither_torch_nor_vllm() -> None:
    check = "import sys, yatt_mm.protocol.group_record; assert not {'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
