"""Tests that vLLM serves Qwen3-VL, dense and with experts, with the same numbers as transformers, also with weights
from the trainer, and that random conversations are those of transformers and of the trainer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from models.layout.parallel import Parallel
from tests.yatt_mm.rollout import clips
from tests.yatt_mm.rollout.agreement.checks import all_asked, check_against_processor, check_against_trainer
from tests.yatt_mm.rollout.conftest import Prompts, Run, engine_config
from tests.yatt_mm.rollout.families import build_served_folder
from tests.yatt_mm.rollout.reference import of_transformers
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import release_experts
from yatt_mm.protocol.published import Published
from yatt_mm.rollout.vllm_engine import GenerateRequest, Sampled, VllmEngine

IMAGES = range(3)


@pytest.mark.parity
@pytest.mark.parametrize("has_experts", [pytest.param(False, id="qwen3_vl"), pytest.param(True, id="qwen3_vl_moe")])
def test_qwen3_vl_is_served_from_its_folder_and_from_the_trainer_alike(
    has_experts: bool,
    prompts: Prompts,
    client: Client,
    reader: Reader,
    run: Run,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    written = [build_served_folder(tmp_path / str(seed), seed, has_experts=has_experts) for seed in (0, 1)]
    first, second = (released(folder) if has_experts else folder for folder in written)
    segments = [str(tmp_path / f"{folder.name}.segment") for folder in (first, second)]
    parallel = Parallel(tp=2, ep=2, sp=True) if has_experts else Parallel(tp=2)
    for folder, path, version in zip((first, second), segments, (2, 1), strict=True):
        ranks.run(2, jobs.publish, folder, parallel, path, version)
    requests = prompts.requests(IMAGES, num_samples=2, max_tokens=6)
    made = clips.make_clips(client, first, tmp_path)
    asked = all_asked(made)
    conversations: list[GenerateRequest] = []

    async def answers() -> list[list[list[Sampled]]]:
        engine = await VllmEngine.start(engine_config(first, name="qwen3"))
        try:
            from_folder = await engine.generate_batch(requests)
            await engine.update_weights(Published(version=1, path=segments[1]))
            other = await engine.generate_batch(requests)
            await engine.update_weights(Published(version=2, path=segments[0]))
            from_trainer = await engine.generate_batch(requests)
            conversations.extend(
                clips.request_for(made, one, engine.tokenizer, engine.media_tokens, reader) for one in asked
            )
            return [from_folder, other, from_trainer, await engine.generate_batch(conversations)]
        finally:
            await engine.shutdown()

    from_folder, other, from_trainer, answered = run(answers())
    check_against_processor(first, made, asked, conversations)
    check_against_trainer(ranks, first, conversations, answered)
    assert numbers(from_trainer) == numbers(from_folder)
    assert numbers(other) != numbers(from_folder)
    for folder, groups in zip(written, (from_folder, other), strict=True):
        for request, group in zip(requests, groups, strict=True):
            responses = [sampled.token_ids for sampled in group]
            wanted = of_transformers(folder, request.prompt_token_ids, request.media[0].patches, responses)
            for sampled, logprobs in zip(group, wanted, strict=True):
                assert sampled.logprobs == pytest.approx(logprobs, abs=1e-4)


def released(folder: Path) -> Path:
    """Return a copy of the model with its experts in the form that vLLM reads."""
    copied = shutil.copytree(folder, folder.with_name(f"{folder.name}-released"))
    release_experts(copied / "model.safetensors")
    return copied


def numbers(groups: list[list[Sampled]]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(sampled.token_ids, sampled.logprobs) for group in groups for sampled in group]
