"""Tests of parallel layouts and patch recipes: what a folder gives, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from models.layout.parallel import Parallel, check_layout
from models.layout.stages import stage_layers
from models.qwen2_5_vl.recipe import patch_recipe, pixel_affine
from models.recipes.media_recipes import MediaRecipes, VideoSampling, load_recipes
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
        (Parallel(pp=4), "parallel.pp is 4 and the model has 2 layers.*choose 1 or 2$"),
        (Parallel(first_stage_layers=1), "first_stage_layers is 1 and parallel.pp is 1: one stage"),
        (Parallel(vpp=2), "vpp is 2 and parallel.pp is 1"),
        (Parallel(pp=2, vpp=2), r"the stages have \[1, 1\] layers.*choose 1$"),
        (Parallel(pp=2, first_stage_layers=2), "leave 0 of 2 layers to 1 other stages.*set first_stage_layers to 1$"),
        (Parallel(tp=2, cp=4), "parallel.cp is 4.* 2 attention heads.*choose parallel.cp 1 or 2, or .*allgather"),
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
    with pytest.raises(
        ValueError, match=r"first stage has 2 layers .* first 3 layers .*first_stage_layers to 3 or more"
    ):
        check_layout(Parallel(pp=4), config)
    with pytest.raises(ValueError, match=r"first run of layers has 2 layers .*lower parallel.vpp \(now 2\)"):
        check_layout(Parallel(pp=2, vpp=2), config)


@pytest.mark.parametrize(
    ("ends", "stages"),
    [
        ({"pp": 4}, [7, 7, 7, 7]),
        ({"pp": 4, "first": 4}, [4, 8, 8, 8]),
        ({"pp": 4, "first": 4, "last": 4}, [4, 10, 10, 4]),
        ({"pp": 2, "first": 12, "last": 16}, [12, 16]),
        ({"pp": 3, "last": 4, "vpp": 4}, [12, 12, 4]),
    ],
)
def test_the_ends_of_the_pipeline_may_have_layers_of_their_own(ends: dict[str, int], stages: list[int]) -> None:
    assert stage_layers(28, **ends) == stages


@pytest.mark.parametrize(
    ("ends", "advice"),
    [
        ({"pp": 4, "first": 5}, "set first_stage_layers to 1 or 4 or 7"),
        ({"pp": 4, "last": 8}, "set last_stage_layers to 4 or 7 or 10"),
        ({"pp": 2, "first": 10, "last": 10}, "set first_stage_layers to 18"),
        ({"pp": 2, "first": 10, "last": 30}, "give them fewer layers"),
        ({"pp": 2, "vpp": 3}, "choose 1 or 2 or 7"),
    ],
)
def test_stages_that_do_not_divide_are_refused_with_the_nearest_that_do(ends: dict[str, int], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        stage_layers(28, **ends)


EXPERTS = {"num_experts": 8, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(ep=3, dp=3), "parallel.ep is 3 and the model has 8 experts"),
        (Parallel(etp=5, dp=5), "parallel.etp is 5 .* 24 MLP columns of an expert"),
        (Parallel(ep=4, dp=2), "ep x etp is 4, and a pipeline stage .* = 2 .* set parallel.dp to 4"),
        (Parallel(tp=2, ep=2), "every tensor-parallel rank needs tokens of its own: set parallel.sp=true"),
    ],
)
def test_impossible_layouts_of_experts_are_refused(parallel: Parallel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(parallel, {"model_type": "qwen3_vl_moe", "text_config": TEXT | EXPERTS})


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


def test_a_model_takes_videos_if_it_has_a_recipe_for_them() -> None:
    both, images = MediaRecipes(image={"a": 1}, video={"b": 2}), MediaRecipes(image={"a": 1})
    assert both.takes("image") and both.takes("video") and images.takes("image") and not images.takes("video")
    assert both.by_kind() == {"image": {"a": 1}, "video": {"b": 2}} and images.by_kind() == {"image": {"a": 1}}
    assert both.of("video") == {"b": 2} and both.of("image") == {"a": 1}


def test_the_recipe_of_videos_names_the_decoder_of_the_run(tiny_dir: Path) -> None:
    for sampling, decoder in ((VideoSampling(), "pyav"), (VideoSampling(decoder="decord"), "decord")):
        recipe = load_recipes(tiny_dir, sampling).video
        assert recipe is not None and recipe["decoder"] == decoder


def test_a_folder_that_says_nothing_of_videos_has_two_frames_a_second(tiny_dir: Path, tmp_path: Path) -> None:
    for file in tiny_dir.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps({"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 1, "max_pixels": 9})
    )
    for given, fps in ((None, 2.0), (5.0, 5.0)):
        recipe = load_recipes(tmp_path, VideoSampling(fps=given)).video
        assert recipe is not None
        sampling = recipe["sampling"]
        assert (sampling["fps"], sampling["min_frames"], sampling["max_frames"]) == (fps, 4, 768)


@pytest.mark.parametrize(
    ("low", "high"), [({"min_frames": 9}, {"max_frames": 8}), ({"min_pixels": 5000}, {"max_pixels": 4000})]
)
def test_bounds_of_videos_in_the_wrong_order_are_refused_with_both(
    low: dict[str, int], high: dict[str, int], tiny_dir: Path
) -> None:
    (low_name, low_value), (high_name, high_value) = *low.items(), *high.items()
    with pytest.raises(ValueError, match=f"{low_name} {low_value} above {high_name} {high_value}; .*set both there"):
        load_recipes(tiny_dir, VideoSampling(**low, **high))
    equal = {low_name: high_value}
    assert load_recipes(tiny_dir, VideoSampling(**equal, **high)).video is not None
