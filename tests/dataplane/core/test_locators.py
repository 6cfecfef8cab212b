"""Tests that locators have the same columns as a record batch and as JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.arrays import ITEM_BYTES
from dataplane.core.errors import DataPlaneError
from dataplane.core.locators import MAX_JSON_OBJECTS, Locators
from dataplane.core.schemas import LOCATORS

LONG = st.integers(0, (1 << 63) - 1)
ROW = st.tuples(
    st.integers(0, 1000),
    st.integers(-1, 1 << 62),
    LONG,
    st.sampled_from(list(ITEM_BYTES)),
    st.lists(LONG, max_size=4),
    LONG,
    LONG,
)


@given(st.lists(ROW, min_size=1, max_size=50))
def test_locators_come_back_from_a_record_batch_and_from_json_as_they_were(rows: list[tuple]) -> None:
    locators = Locators(*(list(column) for column in zip(*rows, strict=True)))
    batch = locators.to_batch()
    batch.validate(full=True)
    assert batch.schema.equals(LOCATORS)
    assert [tuple(row.values()) for row in batch.to_pylist()] == rows
    assert Locators.from_batch(batch) == locators
    assert Locators.from_batch(locators.to_batch().slice(1)).lease == locators.lease[1:]
    assert Locators.from_json(json.loads(locators.to_json())) == locators


def test_an_answer_without_locators_is_an_error() -> None:
    with pytest.raises(DataPlaneError, match="wanted locators"):
        Locators.from_json({"locators": {"offset": [1]}})


def test_few_and_many_refs_resolve_to_the_same_bytes(node: EmbeddedNode) -> None:
    with Client(node.uri) as client, Reader(node.uri) as reader:
        contents = [bytes([number % 251]) * (100 + number) for number in range(2 * MAX_JSON_OBJECTS)]
        refs = [client.put(data, name=f"locators/{len(data)}", shape=(1, len(data))) for data in contents]
        many = reader.resolve(refs)
        few = [view for ref in refs for view in reader.resolve([ref])]
        assert [view.tobytes() for view in many] == [view.tobytes() for view in few] == contents
        assert all(view.shape == ref.shape for view, ref in zip(many, refs, strict=True))
        del many, few
        client.release(refs)
