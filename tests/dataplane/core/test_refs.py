"""Tests that refs are small, picklable, JSON-safe, and hashable by name."""

import json
import pickle

import pytest

from dataplane.core.digests import derived_name, recipe_digest
from dataplane.core.errors import ERRORS
from dataplane.core.refs import Lineage, Ref
from tests.dataplane.shards import RECIPE

REF = Ref(
    name="d/" + "0" * 32 + "/" + "1" * 16,
    kind="derived",
    dtype="uint8",
    shape=(16, 1176),
    nbytes=16 * 1176,
    node="abcd",
    lineage=Lineage(dataset="train", shard="a.tar", offset=512, nbytes=99, source="0" * 32, recipe=dict(RECIPE)),
    meta={"grid_thw": [1, 4, 4], "num_tokens": 4},
)


def test_a_ref_survives_json_and_pickle_and_stays_small() -> None:
    assert Ref.from_dict(json.loads(json.dumps(REF.to_dict()))) == REF
    assert pickle.loads(pickle.dumps(REF)) == REF
    assert hash(REF) == hash(REF.name)
    assert len(pickle.dumps(REF)) < 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "magic"}, "ref.kind is 'magic'; wanted one of source"),
        ({"nbytes": "12"}, r"ref.nbytes is '12' \(str\); wanted int"),
        ({"nbytes": True}, "ref.nbytes is 'True'"),
        ({"shape": [1, -2]}, "ref.shape"),
        ({"shape": [True, 2]}, "ref.shape"),
        ({"shape": [0, 10**30]}, "ref.shape.*fit 64 bits"),
        ({"shape": [1] * 33}, "ref.shape has 33 dimensions"),
        ({"nbytes": -1}, "ref.shape .* takes 18816 bytes, found -1 as ref.nbytes"),
        ({"nbytes": 1 << 63, "shape": [1 << 62, 2]}, "ref.nbytes is 9223372036854775808"),
        ({"dtype": "float32"}, "ref.shape .* of float32 takes 75264 bytes, found 18816 as ref.nbytes"),
        ({"dtype": "object"}, "ref.dtype is 'object'; wanted one of bool"),
        ({"version": -1}, "ref.version is -1; wanted 0 or more, in 63 bits"),
        ({"lineage": REF.lineage.to_dict() | {"nbytes": -1}}, "lineage.nbytes is -1"),
        ({"lineage": REF.lineage.to_dict() | {"offset": 1 << 63}}, "lineage.offset is 9223"),
        ({"lineage": {"dataset": "a"}}, "lineage.recipe is missing"),
    ],
)
def test_a_malformed_ref_is_refused_with_its_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ref.from_dict(REF.to_dict() | change)


def test_a_recipe_has_one_digest_whatever_the_order_of_its_keys() -> None:
    assert recipe_digest({key: RECIPE[key] for key in reversed(list(RECIPE))}) == recipe_digest(RECIPE)
    assert recipe_digest({**RECIPE, "patch_size": 16}) != recipe_digest(RECIPE)
    assert derived_name("ab", RECIPE) == f"d/ab/{recipe_digest(RECIPE)}"


def test_every_error_is_picklable_and_a_standard_exception_too() -> None:
    for error in ERRORS.values():
        assert str(pickle.loads(pickle.dumps(error("found; wanted")))) == "found; wanted"
        assert len(error.__mro__) > 3 or error is ERRORS["DataPlaneError"]
