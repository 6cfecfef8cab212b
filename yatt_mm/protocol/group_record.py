"""The record of one group as bytes: one Arrow IPC stream, stored as one object of the data plane.

Any Arrow client can read it: one record batch with one row per sample; the prompt, which belongs to the whole group, is
in the schema's metadata. It needs neither torch nor vLLM, because trainers, reward workers and people read it. Rewards
and advantages are not in it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

FORMAT = b"yatt_mm.group.1"


class RecordError(ValueError):
    """The bytes are not a group record of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One sampled response."""

    token_ids: np.ndarray
    """[T] int64 ids of the sampled tokens, the end-of-sequence token included when it was sampled."""
    logprobs: np.ndarray
    """[T] float32 log-probability of each sampled token under the distribution it was drawn from."""
    policy_versions: np.ndarray
    """[T] int64 version of the weights that gave each token."""
    text: str
    """The response without special tokens, for the reward function."""
    finish_reason: str
    """"stop" (end of sequence), "length" (max_tokens) or "abort"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A prompt and its samples."""

    prompt_token_ids: np.ndarray
    """[P] int64 ids that the engine was given, image placeholders expanded. The trainer uses exactly these."""
    samples: tuple[SampleRecord, ...]


def encode(record: GroupRecord) -> pa.Buffer:
    """Return the record as an Arrow IPC stream."""
    prompt = np.ascontiguousarray(record.prompt_token_ids, dtype=np.int64)
    schema = _SCHEMA.with_metadata({b"format": FORMAT, b"prompt_token_ids": json.dumps(prompt.tolist()).encode()})
    samples = record.samples
    columns = [
        _lists([sample.token_ids for sample in samples], pa.int64()),
        _lists([sample.logprobs for sample in samples], pa.float32()),
        _lists([sample.policy_versions for sample in samples], pa.int64()),
        pa.array([sample.text for sample in samples], pa.string()),
        pa.array([sample.finish_reason for sample in samples], pa.string()),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=schema))
    return sink.getvalue()


def decode(data: np.ndarray) -> GroupRecord:
    """Return the record in `data` ([N] uint8, such as a view of the data plane). Its arrays are copies and keep no
    lease.

    Raises RecordError when the bytes are something else.
    """
    try:
        table = pa.ipc.open_stream(pa.py_buffer(np.ascontiguousarray(data))).read_all()
    except pa.ArrowInvalid as error:
        raise RecordError(f"{data.nbytes} bytes are no Arrow stream ({error}); wanted a group record") from error
    metadata = table.schema.metadata or {}
    if metadata.get(b"format") != FORMAT:
        raise RecordError(f"found format {metadata.get(b'format')!r}; this reader wants {FORMAT!r}")
    columns = [_arrays(table, name) for name in ("token_ids", "logprobs", "policy_versions")]
    samples = (
        SampleRecord(token_ids=ids, logprobs=logprobs, policy_versions=versions, text=text, finish_reason=reason)
        for ids, logprobs, versions, text, reason in zip(
            *columns, table["text"].to_pylist(), table["finish_reason"].to_pylist(), strict=True
        )
    )
    prompt = np.array(json.loads(metadata[b"prompt_token_ids"]), dtype=np.int64)
    return GroupRecord(prompt_token_ids=prompt, samples=tuple(samples))


_SCHEMA = pa.schema(
    [
        pa.field("token_ids", pa.list_(pa.int64()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("policy_versions", pa.list_(pa.int64()), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ]
)


def _lists(rows: Sequence[np.ndarray], value_type: pa.DataType) -> pa.ListArray:
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
    dtype = value_type.to_pandas_dtype()
    values = np.concatenate([np.asarray(row, dtype=dtype) for row in rows]) if rows else np.empty(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, value_type))


def _arrays(table: pa.Table, name: str) -> list[np.ndarray]:
    return [np.array(row.values, copy=True) for row in table[name]]
