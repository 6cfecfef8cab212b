"""The vision-language model on megatron-core: a vision tower on the first pipeline stage, and a decoder over all
stages.

It turns a packed microbatch into log-probabilities and entropies of its scored tokens, or, as a critic, into the values
of the states before them. The differences between families are in their folders; building and loading is in
`models.build`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from models.compat.megatron_core import MegatronModule, ModelType, TransformerConfig, parallel_state, tensor_parallel
from models.decoder.core_attention import PackedParams
from models.decoder.decoder import Decoder, block_spec, mark_experts, mark_tensor_parallel
from models.decoder.logprob import Head, linear_logprob
from models.decoder.value_head import ValueHead
from models.layout.gather import gather_rows
from models.sequence.mrope import MRope
from models.sequence.packing import PackedBatch
from models.vision.tower import VisionTower

Scores = Literal["logprobs", "values"]
"""What the last stage computes of each scored token: its log-probability and entropy, or, in a critic, the value of the
state before it."""


class VisionLanguageModel(MegatronModule):
    """A chunk of a pipeline stage's layers. The first chunk of the pipeline also has the vision tower, the last one the
    head.

    megatron's schedules and gradient reductions read the public attributes.
    """

    def __init__(
        self,
        hf_config: Any,
        config: TransformerConfig,
        num_rows: int,
        tower: VisionTower | None,
        rope: MRope,
        chunk: int,
        scores: Scores = "logprobs",
    ) -> None:
        """`num_rows` are the rows of the vocabulary over all tensor-parallel ranks. Only the first chunk of the first
        stage gets a `tower`. `chunk` numbers this stage's chunks of layers (there is one, unless the pipeline is
        virtual)."""
        super().__init__(config=config)
        text: Any = hf_config.text_config
        self.pre_process = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
        self.post_process = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
        self.vp_stage = chunk if config.virtual_pipeline_model_parallel_size else None
        self.model_type = ModelType.encoder_or_decoder
        has_values = scores == "values"
        self.share_embeddings_and_output_weights = bool(hf_config.tie_word_embeddings) and not has_values
        self.vocab_size = text.vocab_size
        self.vision_model = tower
        self.language_model = Decoder(
            config,
            block_spec(config, chunk),
            vocab_size=num_rows,
            max_sequence_length=text.max_position_embeddings,
            pre_process=self.pre_process,
            post_process=self.post_process,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            position_embedding_type="mrope",
            rotary_base=int(text.rope_parameters["rope_theta"]),
            scatter_embedding_sequence_parallel=False,
            vp_stage=self.vp_stage,
        )
        self.language_model.rotary_pos_emb = rope
        self.value_head: ValueHead | None = None
        if has_values:
            self.language_model.drop_output_layer()
            if self.post_process:
                self.value_head = ValueHead(config.hidden_size, config.params_dtype)
        if tower is not None:
            self.language_model.add_deepstack(tower.num_deepstack)
        mark_tensor_parallel(self)
        mark_experts(self)

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        """Return the tied weight, whose gradients are summed over the first and last stage."""
        return self.language_model.shared_embedding_or_output_weight()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the hidden states from the stage before."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(self, batch: PackedBatch, temperature: float) -> torch.Tensor:
        """Return hidden states for the next stage; on the last stage return [2, K], log-probabilities and entropies, or
        as a critic [1, K], values."""
        embedded, deepstack = self._embed(batch) if self.pre_process else (None, None)
        hidden = self.language_model(
            input_ids=None,
            position_ids=batch.position_ids,
            attention_mask=None,
            decoder_input=embedded,
            packed_seq_params=PackedParams.of(batch.segments, batch.share),
            # megatron passes a `context` to every layer and through activation checkpoints
            extra_block_kwargs={"context": deepstack},
        )
        return self._score(hidden, batch, temperature) if self.post_process else hidden

    def _embed(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [T, 1, h] token embeddings with visual tokens in their places, and [T, 1, n * h] features that the
        first n layers add.

        Under sequence parallelism it returns this rank's part of both.
        """
        embedded = self.language_model.embedding(batch.token_ids[None], None)
        deepstack = None
        assert self.vision_model is not None
        if batch.grids or self.vision_model.always_runs:
            visual = self.vision_model(batch.images, batch.grids)
            visual = visual.to(embedded.dtype).index_select(0, batch.visual_rows)[:, None]
            visual, features = visual.split([embedded.shape[-1], visual.shape[-1] - embedded.shape[-1]], -1)
            embedded = embedded.index_copy(0, batch.visual_slots, visual)
            if features.shape[-1]:
                empty = embedded.new_zeros(*embedded.shape[:2], features.shape[-1])
                deepstack = empty.index_copy(0, batch.visual_slots, features)
        if self.config.sequence_parallel:
            embedded = tensor_parallel.scatter_to_sequence_parallel_region(embedded)
            if deepstack is not None:
                # a plain slice would keep the other ranks' gradients from the tower
                deepstack = tensor_parallel.scatter_to_sequence_parallel_region(deepstack)
        return embedded, deepstack

    def _score(self, hidden: torch.Tensor, batch: PackedBatch, temperature: float) -> torch.Tensor:
        if self.value_head is not None:
            scores = self._values(hidden, batch, self.value_head)
        else:
            scores = self._logprobs(hidden, batch, temperature)
        if batch.share is None:
            return scores
        # every rank gets all scores, for losses over whole responses, and keeps the gradient of its own scores
        group = parallel_state.get_context_parallel_group()
        return gather_rows(scores.t(), batch.share.num_scores, group)[batch.share.score_places].t()

    def _values(self, hidden: torch.Tensor, batch: PackedBatch, head: ValueHead) -> torch.Tensor:
        if self.config.sequence_parallel:
            # each rank has the whole gradient of the values, so it is cut, and not summed over the ranks
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return head(hidden.squeeze(1).index_select(0, batch.predict_rows))[None]

    def _logprobs(self, hidden: torch.Tensor, batch: PackedBatch, temperature: float) -> torch.Tensor:
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
