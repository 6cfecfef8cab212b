"""Selects one rank's share of a packed batch under context parallelism.

Which rank holds which tokens is in `models.layout.context_parallel`; nothing is sent here. T tokens of the stream, t of
this rank, K scored tokens of the stream, k of them predicted by this rank's tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from models.layout.context_parallel import ContextParallel, places, ranges_of, tokens_of
from models.sequence.packing import ContextShare, PackedBatch


def cut(batch: PackedBatch, context: ContextParallel) -> PackedBatch:
    """Return the batch with this rank's tokens only: token ids, positions, scored tokens and visual tokens are
    selected.

    `segments`, `num_scored` and the media stay those of the whole stream.
    """
    if context.size == 1:
        return batch
    bounds, device = batch.segments.bounds, batch.token_ids.device
    place = torch.from_numpy(places(bounds, context)).to(device)
    tokens = torch.from_numpy(tokens_of(bounds, context)).to(device)
    num_tokens = len(tokens)
    predictor, slot = place[batch.predict_rows], place[batch.visual_slots]
    scorer = predictor // num_tokens
    is_scored, is_visual = scorer == context.rank, slot // num_tokens == context.rank
    share = ContextShare(
        context=context,
        ranges=ranges_of(bounds, context),
        places=place,
        stream=torch.argsort(place),
        num_scores=torch.bincount(scorer, minlength=context.size).tolist(),
        score_places=torch.argsort(torch.argsort(scorer, stable=True)),
    )
    return replace(
        batch,
        token_ids=batch.token_ids[tokens],
        position_ids=batch.position_ids[..., tokens],
        predict_rows=predictor[is_scored] % num_tokens,
        labels=batch.labels[is_scored],
        visual_slots=slot[is_visual] % num_tokens,
        visual_rows=batch.visual_rows[is_visual],
        share=share,
    )
