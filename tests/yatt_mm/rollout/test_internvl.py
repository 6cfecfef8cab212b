"""Tests of InternVL, whose engine does not normalise pixels: the frontend does, and all numbers still equal
transformers'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from dataplane.media.kinds import MediaKind
from dataplane.media.recipes import parse_recipe
from models.layout.parallel import Parallel
from models.registry import load_recipe
from tests.dataplane.shards import noise
from tests.yatt_mm.rollout import clips, positions
from tests.yatt_mm.rollout.agreement.checks import check_against_trainer
from tests.yatt_mm.rollout.conftest import Run, engine_config
from tests.yatt_mm.rollout.conversations import Asked, plain, random_conversations
from tests.yatt_mm.rollout.internvl import build_internvl_folder
from tests.yatt_mm.rollout.test_families import numbers
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.protocol.published import Published
from yatt_mm.rollout.engine_types import MediaTokens
from yatt_mm.rollout.prompt_template import MediumSize, PromptTemplate
from yatt_mm.rollout.vllm_engine import GenerateRequest, Medium, Sampled, VllmEngine

QUESTION = "Which number is written here?"
SIZES = [(60, 60), (56, 112), (150, 70), (40, 40)]
"""The heights and widths of the images: of one tile, and of two or more tiles with the whole image behind them."""
KINDS: tuple[MediaKind, ...] = ("image",) * len(SIZES)
ASKED = [
    *(plain(QUESTION, places, KINDS) for places in ([0], [1], [2, 3], [])),
    *random_conversations(200, KINDS),
]
"""Questions behind images, and random conversations."""
NUM_SERVED = 24
"""The number of them that the engine answers with each version of the weights, and that transformers answers."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("internvl")
    return build_internvl_folder(root / "0", 0), build_internvl_folder(root / "1", 1)


def image_of(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(noise(sum(size), *size))


@cache
def medium_of(folder: Path, size: tuple[int, int]) -> tuple[Medium, int]:
    """Return an image as the data plane derives it, and its number of tokens."""
    plan = parse_recipe(load_recipe(folder).patch_recipe(folder)).plan(image_of(size))
    out = np.empty(math.prod(plan.shape), np.uint8)
    plan.write(out)
    num_tiles, rows, columns = plan.meta["grid_thw"]
    medium = Medium(digest=f"{size}", patches=out.reshape(plan.shape), grid_thw=(num_tiles, rows, columns))
    return medium, plan.meta["num_tokens"]


def template_of(folder: Path) -> PromptTemplate:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marks = load_recipe(folder).IMAGE_MARKS
    tokens = MediaTokens(image=tokenizer.context_image_token_id, video=None, image_marks=marks)
    return PromptTemplate(tokenizer, tokens)


def request_of(folder: Path, asked: Asked) -> GenerateRequest:
    media = [medium_of(folder, SIZES[place]) for place in asked.places]
    sizes = [MediumSize(num_tokens=num) for _, num in media]
    return GenerateRequest(
        prompt_token_ids=template_of(folder).token_ids(asked.conversation, sizes),
        media=tuple(medium for medium, _ in media),
        seeds=(1, 2),
        max_tokens=6,
    )


@cache
def processor_of(folder: Path) -> Any:
    processor = AutoProcessor.from_pretrained(folder)
    processor.image_processor = GotOcr2ImageProcessorPil.from_pretrained(folder)
    return processor


def processed(folder: Path, asked: Asked) -> dict[str, Any]:
    """Return what transformers makes of the same conversation and images."""
    processor = processor_of(folder)
    text = processor.apply_chat_template(
        asked.messages, add_generation_prompt=asked.messages[-1]["role"] != "assistant"
    )
    images = {"images": [image_of(SIZES[place]) for place in asked.places]} if asked.places else {}
    return dict(processor(text=text, return_tensors="pt", **images))


def check_tiles(folder: Path, asked: Sequence[Asked], requests: Sequence[GenerateRequest]) -> None:
    """Check that ids and tiles equal those of the processor, and that positions count the tokens."""
    mean, std = (np.array(values)[:, None, None] for values in load_recipe(folder).pixel_affine(folder))
    for one, request in zip(asked, requests, strict=True):
        wanted = processed(folder, one)
        assert [list(request.prompt_token_ids)] == wanted["input_ids"].tolist()
        found = positions.of_trainer(folder, clips.train_sample(request))
        assert (found == np.arange(len(request.prompt_token_ids))).all()
        if one.places:
            tiles = np.concatenate([medium.patches for medium in request.media])
            assert np.abs((tiles / 255 - mean) / std - wanted["pixel_values"].numpy()).max() < 1e-6


def test_prompts_and_tiles_are_those_of_the_models_own_processor(folders: tuple[Path, Path]) -> None:
    check_tiles(folders[0], ASKED, [request_of(folders[0], asked) for asked in ASKED])


@pytest.mark.parity
def test_internvl_is_served_from_its_folder_and_from_the_trainer_alike(
    folders: tuple[Path, Path], run: Run, ranks: RankPool, tmp_path: Path
) -> None:
    first, second = folders
    segments = [str(tmp_path / f"{folder.name}.segment") for folder in folders]
    for folder, path, version in zip(folders, segments, (2, 1), strict=True):
        ranks.run(2, jobs.publish, folder, Parallel(tp=2), path, version)
    all_requests = [request_of(first, asked) for asked in ASKED]
    requests = all_requests[:NUM_SERVED]

    async def answers() -> list[list[list[Sampled]]]:
        engine = await VllmEngine.start(engine_config(first, name="internvl"))
        try:
            assert not engine.normalizes_on_device
            from_folder = await engine.generate_batch(requests)
            distinct = {medium.digest: medium.patches for request in requests for medium in request.media}
            assert engine.num_ipc_bytes == sum(4 * patches.nbytes for patches in distinct.values())
            await engine.update_weights(Published(version=1, path=segments[1]))
            other = await engine.generate_batch(requests)
            await engine.update_weights(Published(version=2, path=segments[0]))
            from_trainer = await engine.generate_batch(requests)
            return [from_folder, other, from_trainer, await engine.generate_batch(all_requests)]
        finally:
            await engine.shutdown()

    from_folder, other, from_trainer, answered = run(answers())
    check_against_trainer(ranks, first, all_requests, answered)
    assert numbers(from_trainer) == numbers(from_folder)
    assert numbers(other) != numbers(from_folder)
    for folder, groups in ((first, from_folder), (second, other)):
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        for asked, group in zip(ASKED[:NUM_SERVED], groups, strict=True):
            for sampled in group:
                wanted = of_transformers(model, processed(folder, asked), sampled.token_ids)
                assert sampled.logprobs == pytest.approx(wanted, abs=1e-4)


def of_transformers(model: Any, inputs: dict[str, Any], sampled: Sequence[int]) -> list[float]:
    """Return log-probabilities of the sampled tokens, in one pass over prompt and response."""
    tokens = torch.cat([inputs["input_ids"], torch.tensor([list(sampled)])], 1)
    logits = model(input_ids=tokens, pixel_values=inputs.get("pixel_values")).logits
    distribution = logits[0, -len(sampled) - 1 : -1].log_softmax(-1)
    found: list[float] = distribution.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
    return found
