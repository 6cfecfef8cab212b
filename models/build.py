"""Builds this rank's part of a model from a Hugging Face folder, and loads its weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.compat.megatron_core import parallel_state
from models.freeze import PARTS, Part, freeze, part_of
from models.layout.parallel import Parallel
from models.layout.parallel_settings import Recompute, set_recompute
from models.lora.adapters import Adapters
from models.lora.settings import LoraSettings
from models.registry import load_family, load_recipe
from models.sequence.media_tokens import TokenLayout
from models.sequence.mrope import MRope
from models.vision.tower import VisionTower
from models.vlm import Scores, VisionLanguageModel
from models.weights.checkpoint_files import CheckpointFiles
from models.weights.export import ShardedWeights
from models.weights.load import WeightTable, check_finite, check_names
from models.weights.rules import HEADS, VALUE_HEAD
from models.weights.slicing import Shapes

VOCAB_MULTIPLE = 8
"""The number of a tensor-parallel rank's vocabulary rows is padded to a multiple of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The result of `build`: this rank's part of the model, and what is needed to train and export it."""

    model: torch.nn.ModuleList
    """`VisionLanguageModel`s: the chunks of this rank's pipeline stage (one, unless the pipeline is virtual)."""
    weights: ShardedWeights
    table: WeightTable
    files: CheckpointFiles
    layout: TokenLayout
    adapters: Adapters | None
    """Those of LoRA; None without."""


def build(
    model_dir: Path,
    parallel: Parallel,
    dtype: torch.dtype,
    device: torch.device,
    *,
    recompute: Recompute = "none",
    frozen: Collection[Part] = (),
    tower_always_runs: bool = False,
    scores: Scores = "logprobs",
    lora: LoraSettings | None = None,
    seed: int = 0,
) -> Built:
    """Return the model of a Hugging Face folder, with its weights. Every rank of the initialised groups calls this.

    A model that scores `values` does not read the folder's head, and begins with a new one. With `lora` all of the
    model is frozen but its adapters, which `seed` begins.
    """
    if lora is not None and frozen:
        raise ValueError(f"train.freeze names {', '.join(frozen)}, but LoRA freezes all weights; leave it out")
    untrained = frozen if lora is None else set(PARTS) - lora.parts
    family = load_family(model_dir)
    hf_config = family.config.from_pretrained(model_dir)
    files = CheckpointFiles(model_dir)
    text: Any = hf_config.text_config
    num_rows = padded_vocab_size(text.vocab_size, parallel)
    tower: VisionTower | None = None
    if parallel_state.is_pipeline_first_stage():
        mean, std = load_recipe(model_dir).pixel_affine(model_dir)
        tower = family.tower(
            family.make_visual(hf_config, dtype),
            mean=mean,
            std=std,
            group=parallel_state.get_tensor_and_context_parallel_group(),
            sum_group=parallel_state.get_context_parallel_group(),
        )
        tower.always_runs = tower_always_runs
        if recompute == "full" and "tower" not in untrained:
            tower.recompute()
    config = family.transformer_config(hf_config, parallel, dtype)
    set_recompute(config, recompute)
    rope = MRope(
        dim=config.kv_channels or 0,
        theta=float(text.rope_parameters["rope_theta"]),
        sections=config.mrope_section or [],
        is_interleaved=family.has_interleaved_mrope,
    )
    model = torch.nn.ModuleList(
        VisionLanguageModel(hf_config, config, num_rows, tower if chunk == 0 else None, rope, chunk, scores)
        for chunk in range(parallel.vpp)
    )
    freeze(model, frozen)
    shapes = Shapes(
        num_heads=text.num_attention_heads,
        num_groups=text.num_key_value_heads,
        vocab_size=text.vocab_size,
        padded_vocab_size=num_rows,
        expert_ranks=parallel.etp,
    )
    is_critic = scores == "values"
    table = WeightTable([*family.rules(hf_config, files), *[VALUE_HEAD] * is_critic], shapes)
    adapters = Adapters(list(model), lora, rules=table, part_of=part_of, seed=seed) if lora else None
    weights = ShardedWeights(model, table, merged=adapters.merged) if adapters else ShardedWeights(model, table)
    unread = [name for name in files.names if name in HEADS] if is_critic else []
    check_names([*(meta.name for meta in weights.metadata()), *unread], files)
    check_finite([name for chunk in model for name in table.load(chunk, files)], files)
    return Built(
        model=model.to(device),
        weights=weights,
        table=table,
        files=files,
        layout=family.token_layout(hf_config),
        adapters=adapters,
    )


def padded_vocab_size(vocab_size: int, parallel: Parallel) -> int:
    """Return the number of rows of the embedding and of the head, over all tensor-parallel ranks."""
    multiple = VOCAB_MULTIPLE * parallel.tp
    return -(-vocab_size // multiple) * multiple
