"""Tests of InternVL's folder: its recipe, the models that are refused, and checkpoints with either naming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import InternVLConfig, InternVLModel

from models.internvl.config import transformer_config
from models.internvl.recipe import patch_recipe
from models.internvl.tower import Tower, make_visual
from models.layout.parallel import Parallel
from models.weights.rules import Prefixes, end_rules
from tests.yatt_mm.training.tiny import MEAN, STD, build_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("internvl"), "internvl")


def test_the_recipe_cuts_tiles_of_the_towers_size(folder: Path) -> None:
    assert patch_recipe(folder) == {
        "kernel": "tiles",
        "version": 1,
        "tile_size": 16,
        "patch_size": 4,
        "merge_size": 2,
        "min_tiles": 1,
        "max_tiles": 12,
        "resample": "bicubic",
    }


def test_tiles_of_another_size_than_the_towers_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 32}}))
    with pytest.raises(
        ValueError, match=r"size is {'height': 32, 'width': 32} and vision_config.image_size .*one square"
    ):
        patch_recipe(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("text_config", {"model_type": "llama"}, "text_config.model_type is 'llama'.*'qwen2' or 'qwen3'"),
        ("text_config", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "is 'yarn'"),
        ("text_config", {"tie_word_embeddings": True}, "text_config.tie_word_embeddings is True.* has False"),
        ("vision_config", {"use_mask_token": True}, "vision_config.use_mask_token is True"),
        ("vision_config", {"attention_dropout": 0.5}, "vision_config.attention_dropout is 0.5"),
        (None, {"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        (None, {"image_seq_length": 16}, r"image_seq_length is 16 in config.json.* has 4"),
    ],
)
def test_models_of_another_kind_are_refused_with_the_key(
    folder: Path, part: str | None, change: dict[str, Any], message: str
) -> None:
    saved = json.loads((folder / "config.json").read_text())
    (saved if part is None else saved[part]).update(change)
    config = InternVLConfig(**saved)
    with pytest.raises(ValueError, match=message):
        transformer_config(config, Parallel(), torch.float32)


@pytest.mark.parametrize(
    ("text", "visual", "head"),
    [
        ("model.language_model.", "model.", "lm_head.weight"),
        ("language_model.model.", "", "language_model.lm_head.weight"),
    ],
)
def test_checkpoints_of_either_naming_are_read(text: str, visual: str, head: str) -> None:
    names = [text + "embed_tokens.weight", visual + "vision_tower.embeddings.cls_token", head]
    found = Prefixes.found_in(names, "InternVL", visual=("model.", ""), in_visual="vision_tower.embeddings.cls_token")
    assert (found.text, found.visual) == (text, visual)
    assert [head] in [rule.hugging_face for rule in end_rules(found, names, is_head_tied=False)]


def test_the_tower_gives_transformers_embeddings(folder: Path, one_rank: dist.ProcessGroup) -> None:
    model = InternVLModel.from_pretrained(folder, dtype=torch.float32)
    visual = make_visual(model.config, torch.float32)
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("language_model")}
    visual.load_state_dict(weights)
    tower = Tower(visual, mean=MEAN, std=STD, group=one_rank)
    tiles = [np.random.default_rng(n).integers(0, 256, (n, 3, 16, 16), dtype=np.uint8) for n in (1, 3)]
    pixels = tower.normalise(torch.from_numpy(np.concatenate(tiles)))
    wanted = model.get_image_features(
        pixels, vision_feature_layer=-1, vision_feature_select_strategy="default"
    ).pooler_output
    found = tower(tiles, [(1, 4, 4), (3, 4, 4)])
    assert torch.allclose(found, wanted.flatten(0, 1), atol=1e-6)


def test_a_rank_without_tiles_gives_every_parameter_a_gradient_of_zero(
    folder: Path, one_rank: dist.ProcessGroup
) -> None:
    tower = Tower(
        make_visual(InternVLConfig.from_pretrained(folder), torch.float32), mean=MEAN, std=STD, group=one_rank
    )
    tower.always_runs = True
    nothing = tower([], [])
    assert nothing.shape == (0, 64)
    nothing.sum().backward()
    assert all(param.grad is not None and not param.grad.any() for param in tower.parameters())
