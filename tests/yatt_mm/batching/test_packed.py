"""Tests of the compact form of values that are passed on."""

from __future__ import annotations

import pickle

import pytest

from dataplane.core.refs import Ref
from yatt_mm.batching.packed import Packed


def refs(num: int) -> list[Ref]:
    return [
        Ref(name=f"d/{n:032x}", kind="derived", dtype="uint8", shape=(n, 3), nbytes=3 * n, node="a", lineage=None)
        for n in range(num)
    ]


@pytest.mark.parametrize("value", [None, 7, "a text", refs(1), refs(1000)], ids=["none", "int", "text", "ref", "refs"])
def test_a_value_comes_back_as_it_was(value: object) -> None:
    assert Packed.of(value).open() == value


def test_many_refs_take_a_fifth_of_their_bytes() -> None:
    plain = pickle.dumps(refs(1000), protocol=pickle.HIGHEST_PROTOCOL)
    assert len(pickle.dumps(Packed.of(refs(1000)))) < len(plain) / 5
