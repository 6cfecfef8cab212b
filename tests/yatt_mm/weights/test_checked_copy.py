"""Tests that the copy refuses every value that is not finite, wherever it is and whatever its bits are."""

from __future__ import annotations

import pytest
import torch

from yatt_mm.weights import checked_copy
from yatt_mm.weights.checked_copy import NonFiniteWeightsError, copy_finite

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_value_is_copied_as_it_is(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = [0.0, -0.0, limits.max, limits.min, limits.tiny, -limits.tiny, limits.smallest_normal, -1.0, 1.0]
    source, place = torch.tensor(values, dtype=dtype), torch.full((9,), torch.nan, dtype=dtype)
    copy_finite("w", source, place)
    assert torch.equal(place, source)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 6, 4999])
def test_a_value_that_is_not_finite_is_refused_with_the_tensors_name(
    dtype: torch.dtype, value: float, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_copy, "CHUNK_BYTES", 64)
    source = torch.randn(5000).to(dtype)
    source[at] = value
    with pytest.raises(NonFiniteWeightsError, match=r"layer\.3 has values that are not finite"):
        copy_finite("layer.3", source.view(50, 100), torch.zeros(50, 100, dtype=dtype))


def test_the_memory_of_a_copied_parameter_can_still_be_released() -> None:
    source = torch.ones(8)
    copy_finite("w", source, torch.zeros(8))
    source.untyped_storage().resize_(0)
    assert source.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_16_bit_patterns_are_judged_as_torch_judges_them(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite, others = values[values.isfinite()], values[~values.isfinite()]
    place = torch.zeros_like(finite)
    copy_finite("w", finite, place)
    assert torch.equal(place, finite)
    for value in others.split(1):
        with pytest.raises(NonFiniteWeightsError):
            copy_finite("w", value, place[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_whose_sum_overflows_or_cancels_are_judged_one_by_one(dtype: torch.dtype) -> None:
    largest = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    place = torch.zeros_like(largest)
    copy_finite("w", largest, place)
    assert torch.equal(place, largest)
    with pytest.raises(NonFiniteWeightsError):
        copy_finite("w", torch.tensor([torch.inf, -torch.inf], dtype=dtype), place[:2])


def test_strided_places_scalars_and_integers_are_copied_too() -> None:
    whole = torch.zeros(6, 8)
    copy_finite("w", torch.ones(6, 3), whole[:, 2:5])
    assert whole.sum() == 18 and whole[:, 2:5].eq(1).all()
    for value in (torch.tensor(2.5), torch.tensor([2**31 - 1], dtype=torch.int32), torch.zeros(0, 3)):
        place = torch.zeros_like(value)
        copy_finite("w", value, place)
        assert torch.equal(place, value)
