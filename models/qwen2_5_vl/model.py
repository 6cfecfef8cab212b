"""Qwen2.5-VL on megatron-core: Hugging Face's vision tower on the first pipeline stage, a GPTModel decoder.

`build` makes this rank's part of the model with the folder's weights; the model turns a packed microbatch into
log-probabilities and entropies of its scored tokens. Leaves out optimisation and checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from models.attention import PackedCoreAttention, PackedParams
from models.checkpoint_files import CheckpointFiles
from models.logprob import Head, linear_logprob
from models.megatron import (
    ColumnParallelLinear,
    GPTModel,
    MegatronModule,
    ModelType,
    RowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    VocabParallelEmbedding,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
    parallel_state,
    set_tensor_model_parallel_attributes,
    tensor_parallel,
)
from models.mrope import MRope
from models.packing import PackedBatch, TokenLayout
from models.parallel import Parallel
from models.qwen2_5_vl.config import padded_vocab_size, transformer_config
from models.qwen2_5_vl.mapping import rules
from models.qwen2_5_vl.recipe import pixel_affine
from models.vision import VisionTower
from models.weights import Shapes, WeightTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """This rank's part of the model, and what belongs to it."""

    model: Qwen2_5_VL
    table: WeightTable
    files: CheckpointFiles
    layout: TokenLayout


def build(model_dir: Path, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> Built:
    """The model of a Hugging Face folder, with its weights. Every rank of the initialised groups calls it."""
    hf_config = Qwen2_5_VLConfig.from_pretrained(model_dir)
    files = CheckpointFiles(model_dir)
    text: Any = hf_config.text_config
    vision: Any = hf_config.vision_config
    padded = padded_vocab_size(hf_config, parallel)
    tower = _vision_tower(model_dir, hf_config, dtype) if parallel_state.is_pipeline_first_stage() else None
    model = Qwen2_5_VL(hf_config, transformer_config(hf_config, parallel, dtype), padded, tower)
    shapes = Shapes(
        num_heads=text.num_attention_heads,
        num_groups=text.num_key_value_heads,
        vocab_size=text.vocab_size,
        padded_vocab_size=padded,
    )
    table = WeightTable(rules(files.names, is_head_tied=model.share_embeddings_and_output_weights), shapes)
    table.check_names(model, files)
    table.load(model, files)
    layout = TokenLayout(
        image_token_id=hf_config.image_token_id,
        video_token_id=hf_config.video_token_id,
        merge_size=vision.spatial_merge_size,
    )
    return Built(model=model.to(device), table=table, files=files, layout=layout)


class Qwen2_5_VL(MegatronModule):
    """This pipeline stage's part. megatron's schedules and gradient reductions read the public attributes."""

    def __init__(
        self, hf_config: Qwen2_5_VLConfig, config: TransformerConfig, num_rows: int, tower: VisionTower | None
    ) -> None:
        """`num_rows` of the vocabulary over all tensor-parallel ranks; `tower` on the first stage only."""
        super().__init__(config=config)
        text: Any = hf_config.text_config
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = bool(hf_config.tie_word_embeddings)
        self.vocab_size = text.vocab_size
        self.vision_model = tower
        theta = float(text.rope_parameters["rope_theta"])
        self.language_model = _Decoder(
            config,
            _block_spec(config),
            vocab_size=num_rows,
            max_sequence_length=text.max_position_embeddings,
            pre_process=self.pre_process,
            post_process=self.post_process,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            position_embedding_type="mrope",
            rotary_base=int(theta),
            scatter_embedding_sequence_parallel=False,
        )
        rope = MRope(dim=config.kv_channels or 0, theta=theta, sections=config.mrope_section or [])
        self.language_model.rotary_pos_emb = rope
        _mark_tensor_parallel(self)

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        """The tied weight, for the sum of its gradients over the first and last stage."""
        return self.language_model.shared_embedding_or_output_weight()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Hidden states from the stage before."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(self, batch: PackedBatch, temperature: float) -> torch.Tensor:
        """Hidden states for the next stage, or on the last [2, K]: log-probabilities, entropies."""
        hidden = self.language_model(
            input_ids=None,
            position_ids=batch.position_ids,
            attention_mask=None,
            decoder_input=self._embed(batch) if self.pre_process else None,
            packed_seq_params=PackedParams.of(batch.segments),
        )
        return self._score(hidden, batch, temperature) if self.post_process else hidden

    def _embed(self, batch: PackedBatch) -> torch.Tensor:
        """[T, 1, h] token embeddings with visual tokens in their places (under sequence parallelism, a part)."""
        embedded = self.language_model.embedding(batch.token_ids[None], None)
        if batch.images:
            assert self.vision_model is not None
            visual = self.vision_model(batch.images, batch.grids)
            visual = visual.to(embedded.dtype).index_select(0, batch.visual_rows)
            embedded = embedded.index_copy(0, batch.visual_slots, visual[:, None])
        if self.config.sequence_parallel:
            embedded = tensor_parallel.scatter_to_sequence_parallel_region(embedded)
        return embedded

    def _score(self, hidden: torch.Tensor, batch: PackedBatch, temperature: float) -> torch.Tensor:
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.language_model.output_layer.weight
        group = parallel_state.get_tensor_model_parallel_group()
        head = Head(group=group, vocab_size=self.vocab_size, temperature=temperature)
        rows = hidden.squeeze(1).index_select(0, batch.predict_rows)
        return torch.stack(linear_logprob(rows, weight, batch.labels, head))


class _Decoder(GPTModel):
    """GPTModel that stops before the head: `Qwen2_5_VL._score` applies it to scored tokens only."""

    def _postprocess(self, hidden_states: torch.Tensor, **unused: Any) -> torch.Tensor:
        return hidden_states


class _RMSNorm(torch.nn.Module):
    """Like Hugging Face's; megatron's own refuses sequence parallelism, where the weight needs only a mark."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = torch.nn.functional.rms_norm(hidden.float(), (hidden.shape[-1],), eps=self.eps)
        return normal.to(hidden.dtype) * self.weight


def _block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _RMSNorm
    spec.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    num_layers = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=_RMSNorm)


def _vision_tower(model_dir: Path, hf_config: Qwen2_5_VLConfig, dtype: torch.dtype) -> VisionTower:
    visual = Qwen2_5_VisionTransformerPretrainedModel._from_config(hf_config.vision_config, dtype=dtype)
    mean, std = pixel_affine(model_dir)
    return VisionTower(visual, mean=mean, std=std, group=parallel_state.get_tensor_model_parallel_group())


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Mark weights that are cut over ranks: without initialisation megatron does not, and then the gradient
    norm silently counts the first rank's part only."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dim = 0
        elif isinstance(module, RowParallelLinear):
            dim = 1
        else:
            continue
        weight = module.weight
        if weight is not None and "tensor_model_parallel" not in vars(weight):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
