"""Tests of writing a checkpoint folder with the same files as another one: it is there complete or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.weights.checkpoint_files import INDEX, SINGLE, CheckpointFiles


@pytest.fixture
def source(tmp_path: Path) -> CheckpointFiles:
    """A checkpoint folder with two files of weights and one other file."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, folder / "1.safetensors")
    save_file({"b": torch.zeros(3, dtype=torch.bfloat16)}, folder / "2.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (folder / "config.json").write_text("{}")
    return CheckpointFiles(folder)


def filled(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((2,), value)), ("b", torch.full((3,), value))]


def test_a_written_folder_replaces_an_older_one_and_leaves_nothing_beside_it(
    source: CheckpointFiles, tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "hf"
    source.write_like(folder, filled(1))
    (folder / SINGLE).write_bytes(b"of an older model")
    source.write_like(folder, filled(2))
    assert {path.name for path in folder.iterdir()} == {"1.safetensors", "2.safetensors", INDEX, "config.json"}
    assert load_file(folder / "1.safetensors")["a"].tolist() == [2, 2]
    assert load_file(folder / "2.safetensors")["b"].dtype == torch.bfloat16
    assert list(folder.parent.iterdir()) == [folder]


def test_an_interrupted_write_leaves_the_older_folder_as_it_was_and_the_next_one_cleans_up(
    source: CheckpointFiles, tmp_path: Path
) -> None:
    folder = tmp_path / "out" / "hf"
    source.write_like(folder, filled(1))

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from filled(2)[:1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source.write_like(folder, interrupted())
    assert load_file(folder / "1.safetensors")["a"].tolist() == [1, 1]
    source.write_like(folder, filled(3))
    assert load_file(folder / "1.safetensors")["a"].tolist() == [3, 3]
    assert list(folder.parent.iterdir()) == [folder]


def test_tensors_are_taken_one_by_one_and_to_the_end_where_writing_fails(
    source: CheckpointFiles, tmp_path: Path
) -> None:
    taken = []

    def watched(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            taken.append((name, load_file(tmp_path / ".hf.partial" / source.file_of[name])[name].tolist()))

    source.write_like(tmp_path / "hf", watched(filled(1)))
    assert taken == [("a", [1, 1]), ("b", [1, 1, 1])]  # each is in its file before the next one is asked for
    given = iter([("a", torch.zeros(5)), *filled(1)])
    with pytest.raises(ValueError, match=r"a has shape \[5\], but the model's folder keeps \[2\]"):
        source.write_like(tmp_path / "hf", given)
    assert list(given) == []


def test_nothing_is_written_when_a_tensor_is_missing(source: CheckpointFiles, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds \['b'\]"):
        source.write_like(tmp_path / "hf", filled(1)[:1])
    assert not (tmp_path / "hf").exists()
