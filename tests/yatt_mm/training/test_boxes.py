"""Tests of the boxes into which a stretch of a tensor is divided, and of where they overlap."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from yatt_mm.training.boxes import Box, stretch

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def stretches(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, length - 1)) for length in shape)
    return Box(offset=offset, shape=tuple(draw(st.integers(1, length - at)) for length, at in zip(shape, offset)))


@given(stretches())
def test_the_boxes_of_a_stretch_are_its_elements_in_their_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    whole, tensor = Box(offset=(0,) * len(shape), shape=shape), torch.arange(math.prod(shape)).view(shape)
    found: list[int] = []
    for before, box in stretch(shape, start, stop):
        assert before == len(found)
        values = tensor[box.inside(whole)]
        assert values.is_contiguous() and values.numel() == box.numel
        found += values.flatten().tolist()
    assert found == list(range(start, stop))


@given(stretches())
def test_a_stretch_has_few_boxes(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    assert len(list(stretch(shape, start, stop))) <= 2 * len(shape) - 1


@given(st.data())
def test_two_boxes_overlap_in_the_elements_that_both_have(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    whole, tensor = Box(offset=(0,) * len(shape), shape=shape), torch.arange(math.prod(shape)).view(shape)
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    elements = [set(tensor[box.inside(whole)].flatten().tolist()) for box in (one, other)]
    common = one.overlap(other)
    assert common == other.overlap(one)
    if common is None:
        assert not elements[0] & elements[1]
    else:
        assert set(tensor[common.inside(whole)].flatten().tolist()) == elements[0] & elements[1]
        assert torch.equal(tensor[one.inside(whole)][common.inside(one)], tensor[common.inside(whole)])
