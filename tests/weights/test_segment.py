"""A weight segment gives back what was written, whole or not at all."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yatt_mm.weights.segment import SegmentError, read_segment, write_segment

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def tensors_of(shapes: list[tuple[int, ...]], seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"layer.{i}", torch.randint(0, 100, shape, generator=generator).to(DTYPES[i % len(DTYPES)]))
        for i, shape in enumerate(shapes)
    ]


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=12),
    seed=st.integers(0, 2**31),
)
def test_every_tensor_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], seed: int
) -> None:
    named = tensors_of(shapes, seed)
    path = tmp_path_factory.mktemp("segment") / "weights"
    written = write_segment(path, [named[:5], [], named[5:]])
    found = list(read_segment(path))
    assert [name for name, _ in found] == [name for name, _ in named]
    for (_, wanted), (_, tensor) in zip(named, found, strict=True):
        assert tensor.dtype == wanted.dtype and tensor.shape == wanted.shape
        assert torch.equal(tensor, wanted)
    assert written.num_tensors == len(named)
    assert written.num_bytes == path.stat().st_size


def test_tensors_lie_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    write_segment(tmp_path / "weights", [tensors_of([(3,), (5, 7), (1,)], 0)])
    addresses = [tensor.data_ptr() for _, tensor in read_segment(tmp_path / "weights")]
    assert all(address % 64 == 0 for address in addresses)


def test_a_view_that_is_no_contiguous_tensor_is_written_as_it_reads(tmp_path: Path) -> None:
    transposed = torch.arange(12.0).view(3, 4).t()
    write_segment(tmp_path / "weights", [[("w", transposed), ("b", torch.tensor(2.5))]])
    found = dict(read_segment(tmp_path / "weights"))
    assert torch.equal(found["w"], transposed)
    assert found["b"].shape == () and found["b"].item() == 2.5


def test_views_outlive_the_file_and_writing_into_one_changes_nothing_for_others(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_segment(path, [[("w", torch.ones(8))]])
    mine = dict(read_segment(path))["w"]
    mine.zero_()
    assert torch.equal(dict(read_segment(path))["w"], torch.ones(8))
    path.unlink()
    assert torch.equal(mine, torch.zeros(8))


def test_a_failed_export_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'w' comes twice"):
        write_segment(tmp_path / "weights", [[("w", torch.ones(1))], [("w", torch.ones(1))]])
    assert list(tmp_path.iterdir()) == []


def test_a_torn_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_segment(path, [[("w", torch.ones(64))]])
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[:10], b"", b"x" * len(whole)):
        path.write_bytes(broken)
        with pytest.raises(SegmentError):
            list(read_segment(path))
