"""Checks that an engine's prompts are those of transformers, and that the trainer gives its tokens the same
probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from models.layout.parallel import Parallel
from tests.yatt_mm.rollout import clips, positions
from tests.yatt_mm.rollout.conversations import Asked, plain, random_conversations
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.rollout.vllm_engine import GenerateRequest, Sampled

NUM_CONVERSATIONS = 200
ORDERS = ((1,), (2,), (0, 1), (1, 0), (2, 3, 1), (0,))
"""The media of each prompt, in order: videos alone, mixed with images, images alone."""
CLOSE = 1e-4
"""The largest difference of log-probabilities in fp32."""
NUM_SHIFTED = 12
"""The number of responses whose positions are moved, to see that this makes a difference."""


def all_asked(made: clips.Clips) -> list[Asked]:
    """Return questions behind media, and random conversations."""
    return [
        *(plain(clips.QUESTION, places, made.kinds) for places in ORDERS),
        *random_conversations(NUM_CONVERSATIONS, made.kinds),
    ]


def check_against_processor(
    model_dir: Path, made: clips.Clips, asked: Sequence[Asked], requests: Sequence[GenerateRequest]
) -> None:
    """Check that ids, pixels and times equal those of the processor, and positions those of transformers' model."""
    for one, request in zip(asked, requests, strict=True):
        wanted = clips.of_processor(model_dir, made, one)
        assert list(request.prompt_token_ids) == wanted["input_ids"][0].tolist()
        sample = clips.train_sample(request)
        assert np.array_equal(positions.of_trainer(model_dir, sample), positions.of_transformers(model_dir, wanted))
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            patches = [medium.patches for medium in request.media if medium.kind == kind]
            if patches:
                assert np.array_equal(np.concatenate(patches), wanted[pixels])
        if "second_per_grid_ts" in wanted:
            seconds = [medium.seconds_per_grid for medium in request.media if medium.kind == "video"]
            assert seconds == pytest.approx(list(wanted["second_per_grid_ts"]))


def check_against_trainer(
    ranks: RankPool, model_dir: Path, requests: Sequence[GenerateRequest], groups: Sequence[Sequence[Sampled]]
) -> None:
    """Check that the trainer gives the sampled tokens the same probabilities as the engine, and others if positions
    are moved by one."""
    sampled = [(request, response) for request, group in zip(requests, groups, strict=True) for response in group]
    samples = [clips.train_sample(request, response.token_ids) for request, response in sampled]
    (found, *_) = ranks.run(1, jobs.logprobs_of, model_dir, Parallel(), samples)
    differences = [np.abs(logprobs - own.logprobs).max() for logprobs, (_, own) in zip(found, sampled, strict=True)]
    assert max(differences) <= CLOSE
    (shifted, *_) = ranks.run(1, jobs.logprobs_of_shifted_positions, model_dir, Parallel(), samples[:NUM_SHIFTED])
    assert all(np.abs(logprobs - own.logprobs).max() > CLOSE for logprobs, (_, own) in zip(shifted, sampled))
