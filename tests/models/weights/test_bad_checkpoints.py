"""Tests of folders that cannot be trained: every rank raises the same error, with the names of the tensors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import build_folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("good"))


def spoil(good: Path, directory: Path, what: str) -> str:
    """Write a copy of a folder with one fault. Return the text that the error must contain."""
    shutil.copytree(good, directory)
    tensors = load_file(good / "model.safetensors")
    layer = next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight"))
    norm = layer.replace("mlp.down_proj", "post_attention_layernorm")
    if what == "not finite":
        # on the second rank's part only
        tensors[layer][0, -1] = torch.nan
        said = rf"NaN or infinite: {re.escape(layer)} \(1 tensors in all\)"
    elif what == "missing":
        del tensors[norm]
        said = f"lacks tensors .*{re.escape(norm)}"
    elif what == "of another size":
        tensors[norm] = torch.ones(7)
        said = rf"{re.escape(norm)} .* has the shape \(7,\) where config.json says \(64,\)"
    else:
        tensors[layer.replace("layers.1", "layers.9")] = torch.ones(3)
        said = r"holds tensors that the model .*layers\.9\.mlp\.down_proj\.weight"
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return said


@pytest.mark.parametrize("what", ["not finite", "missing", "of another size", "of more layers"])
def test_a_spoilt_checkpoint_is_refused_by_all_ranks_with_names(
    what: str, good: Path, ranks: RankPool, tmp_path: Path
) -> None:
    said = spoil(good, tmp_path / "spoilt", what)
    for refusal in ranks.run(2, jobs.refusal, tmp_path / "spoilt", Parallel(tp=2)):
        assert re.search(said, refusal)
