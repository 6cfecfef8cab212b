"""Parallel layouts and patch recipes: what a folder says, and what is refused."""

import json
from pathlib import Path

import pytest

from models.parallel import Parallel, check_layout
from models.qwen2_5_vl.recipe import patch_recipe, pixel_affine
from models.registry import read_config

TEXT = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "num_hidden_layers": 2}
CONFIG = {"model_type": "qwen2_5_vl", "text_config": TEXT}
PROCESSOR = {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "resample": 3,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
}


def test_world_size_is_the_product_without_experts() -> None:
    assert Parallel(tp=2, pp=3, dp=4, ep=2).world_size == 24


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(tp=3), "parallel.tp is 3 and the model has 4 attention heads"),
        (Parallel(pp=4), "parallel.pp is 4 and the model has 2 layers"),
        (Parallel(cp=2), "parallel.cp is 2.*cp=1 only"),
        (Parallel(ep=2), "parallel.ep is 2.*no experts"),
    ],
)
def test_impossible_layouts_are_refused_with_the_number_to_change(parallel: Parallel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(parallel, CONFIG)


def test_layers_that_add_features_of_the_tower_must_be_on_the_first_stage() -> None:
    vision = {"deepstack_visual_indexes": [1, 2, 3]}
    config = {"model_type": "qwen3_vl", "text_config": TEXT | {"num_hidden_layers": 8}, "vision_config": vision}
    check_layout(Parallel(pp=2), config)
    with pytest.raises(ValueError, match=r"leaves 2 layers .* first 3 layers .* parallel.pp to 2 or less"):
        check_layout(Parallel(pp=4), config)


def test_possible_layouts_pass_nested_and_flat_configs() -> None:
    for config in (CONFIG, {"model_type": "qwen2_5_vl", **TEXT}):
        for parallel in (Parallel(), Parallel(tp=2, pp=2, dp=3), Parallel(tp=4)):
            check_layout(parallel, config)


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.dp is 0"):
        Parallel(dp=0)


@pytest.mark.parametrize("nested", [False, True])
def test_recipe_reads_old_and_new_processor_files(tmp_path: Path, nested: bool) -> None:
    if nested:
        saved = {"image_processor": PROCESSOR | {"size": {"shortest_edge": 784, "longest_edge": 50176}}}
        (tmp_path / "processor_config.json").write_text(json.dumps(saved))
    else:
        saved = PROCESSOR | {"min_pixels": 784, "max_pixels": 50176}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(saved))
    recipe = patch_recipe(tmp_path)
    assert (recipe["min_pixels"], recipe["max_pixels"], recipe["resample"]) == (784, 50176, "bicubic")
    assert pixel_affine(tmp_path) == ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def test_a_folder_without_processor_or_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        patch_recipe(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="'llama'"):
        read_config(tmp_path)
