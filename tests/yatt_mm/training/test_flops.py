"""Tests of the counted operations that balancing uses, against torch's count while the real engine trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.torch_flops import count
from models.flops import TOWERS, count_operations
from models.layout.parallel import Parallel
from models.lora.settings import LoraSettings
from models.registry import FAMILIES
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import FORMS, MODELS, build_folder, make_samples
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.training.megatron_engine import TrainEngine

VARIANTS: list[dict[str, Any]] = [
    {"freeze": (), "recompute": "none"},
    {"freeze": ("tower",), "recompute": "full"},
    {"freeze": ("tower", "merger"), "recompute": "selective"},
    {"freeze": ("merger",), "recompute": "full"},
]


def counted(rank: int, folder: Path, variants: Sequence[dict[str, Any]] = VARIANTS) -> list[list[int]]:
    """Return [variant][sample] operations of a forward and backward pass over each sample alone."""
    found = []
    for variant in variants:
        optim = AdamSettings(lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95), clip_grad=0.0)
        engine = TrainEngine(model_dir=folder, parallel=Parallel(), optim=optim, seed=1, **variant)
        found.append(
            [
                count(partial(engine.step, [[sample]], jobs.weighted_loss))
                for sample in make_samples(jobs.form_of(engine))
            ]
        )
    return found


@pytest.mark.parametrize(
    "family", [model if model == "qwen2_5_vl" else pytest.param(model, marks=pytest.mark.parity) for model in MODELS]
)
def test_operations_are_those_that_torch_counts(family: str, ranks: RankPool, tmp_path: Path) -> None:
    folder = build_folder(tmp_path, family)
    config = json.loads((folder / "config.json").read_text())
    for variant, found in zip(VARIANTS, ranks.run(1, counted, folder)[0], strict=True):
        operations = count_operations(config, **variant)
        planned = [
            operations.decoder(len(sample.token_ids), int(sample.loss_mask.sum())) + operations.tower(sample.grid_thw)
            for sample in make_samples(FORMS[family])
        ]
        assert found == planned, variant


@pytest.mark.parametrize(
    ("targets", "recompute"),
    [(("language",), "none"), (("language", "tower", "merger"), "none"), (("language",), "full")],
)
def test_with_lora_they_are_nearly_those_that_torch_counts(
    targets: tuple[str, ...], recompute: str, ranks: RankPool, untied_folder: Path
) -> None:
    config = json.loads((untied_folder / "config.json").read_text())
    lora = LoraSettings(rank=1, alpha=1.0, targets=targets)
    operations = count_operations(config, adapted=lora.parts, recompute=recompute)
    found = ranks.run(1, counted, untied_folder, [{"lora": lora, "recompute": recompute}])[0][0]
    for sample, counted_ones in zip(make_samples(), found, strict=True):
        planned = operations.decoder(len(sample.token_ids), int(sample.loss_mask.sum()))
        # the adapters' own are 7 % of so small a model, and the first layer needs no gradient of its input
        assert counted_ones == pytest.approx(planned + operations.tower(sample.grid_thw), rel=0.08)


def test_every_family_has_its_operations() -> None:
    assert TOWERS.keys() >= FAMILIES.keys()


def test_seven_billion_parameters_take_six_operations_a_token_and_parameter() -> None:
    text = {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    }
    tower = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    operations = count_operations({"model_type": "qwen2_5_vl", "vision_config": tower, **text})
    weights = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert operations.per_token == 6 * weights
    assert operations.window == 8
    assert operations.per_window_pair == 28 * 14 * 1280
    frozen = count_operations({"model_type": "qwen2_5_vl", "vision_config": tower, **text}, freeze=("tower", "merger"))
    assert frozen.per_token == operations.per_token
    assert frozen.per_patch * 3 > operations.per_patch > frozen.per_patch * 2.9
    assert operations.tower([(1, 16, 20)]) == (
        operations.per_patch * 320
        + operations.per_patch_pair * 320**2
        + operations.per_window_pair * (2 * 8**2) * (2 * 8**2 + 4**2)
    )
    recomputed = count_operations({"model_type": "qwen2_5_vl", "vision_config": tower, **text}, recompute="full")
    assert recomputed.per_token == 8 * weights
    # but for the last layer of a block's MLP, of which nothing needs the result again
    assert recomputed.per_patch == operations.per_patch + 2 * 32 * (4 * 1280**2 + 2 * 1280 * 3420)


def test_of_a_mixture_only_the_experts_that_a_token_visits_count() -> None:
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 200,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    }
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [0],
    }
    operations = count_operations({"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": tower})
    attention = 2 * 64 * 128 + 2 * 64 * 64
    assert operations.per_token == 6 * (2 * attention + 64 * 8 + 2 * 3 * 64 * 24 + 3 * 64 * 96)
    assert operations.window == 0
    assert operations.tower([(2, 4, 6)]) == 2 * operations.tower([(1, 4, 6)]), "attention stays within a frame"


def test_a_tower_with_a_class_token_counts_it_in_every_frame() -> None:
    text = {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151674,
    }
    tower = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096, "patch_size": [14, 14]}
    config = {"model_type": "internvl", "vision_config": tower, "text_config": text, "downsample_ratio": 0.5}
    operations = count_operations(config)
    blocks, embedding, merger = 24 * (4 * 1024**2 + 2 * 1024 * 4096), 3 * 14 * 14 * 1024, 896 * (4 * 1024 + 896)
    assert operations.per_class_token == 6 * blocks
    assert operations.per_patch == 6 * blocks + 4 * embedding + 6 * merger // 4  # nothing needs the gradient of pixels
    assert operations.per_patch_pair == 24 * 14 * 1024 and not operations.window and not operations.per_window_pair
    of_frame = operations.per_patch * 320 + operations.per_class_token + operations.per_patch_pair * 321**2
    assert operations.tower([(2, 16, 20), (1, 16, 20)]) == 3 * of_frame


def test_layers_without_experts_count_as_dense_ones() -> None:
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 256,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 1000,
    }
    attention, dense, sparse = 2 * 64 * 64 + 2 * 64 * 32, 3 * 64 * 256, 8 * 64 + 3 * 64 * 32 * 2
    tower = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [],
        "num_position_embeddings": 16,
    }
    for only_dense, num_sparse in (((), 4), ((0, 3), 2), ((0, 1, 2, 3), 0)):
        operations = count_operations(
            {
                "model_type": "qwen3_vl_moe",
                "vision_config": tower,
                "text_config": {**text, "mlp_only_layers": list(only_dense)},
            }
        )
        assert operations.per_token == 6 * (4 * attention + num_sparse * sparse + (4 - num_sparse) * dense), only_dense
