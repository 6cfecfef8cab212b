"""Tests that judges of every family read random conversations as their models' own processors give them, and that
their verdicts are those of transformers."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from models.registry import load_recipe
from tests.models.layouts import quick_first
from tests.yatt_mm.rollout import clips, positions
from tests.yatt_mm.rollout.agreement.checks import NUM_CONVERSATIONS, all_asked, check_against_processor
from tests.yatt_mm.rollout.agreement.judged import TEMPLATES, questions, unstarted_engine
from tests.yatt_mm.rollout.conftest import Run
from tests.yatt_mm.rollout.conversations import Asked, random_conversations
from tests.yatt_mm.rollout.families import build_served_folder
from tests.yatt_mm.rollout.internvl import build_internvl_folder
from tests.yatt_mm.rollout.test_internvl import SIZES, check_tiles, image_of
from tests.yatt_mm.rollout.test_remote_judge import server_at
from yatt_mm.genrm.judge import Judge
from yatt_mm.genrm.remote import RemoteJudge
from yatt_mm.protocol.verdicts import YesNo
from yatt_mm.rollout.vllm_engine import GenerateRequest, VllmEngine

VERDICT = YesNo(yes=(" number",), no=(" in", " one"))
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl": lambda folder: build_served_folder(folder, 0),
    "qwen3_vl_moe": lambda folder: build_served_folder(folder, 0, has_experts=True),
    "internvl": lambda folder: build_internvl_folder(folder, 0),
}
QUICK = ("qwen2_5_vl", "qwen3_vl", "internvl")
"""The families of `make test`: one of each processor."""


@pytest.mark.parametrize("family", quick_first(["qwen2_5_vl", *BUILDERS], QUICK))
def test_a_judge_reads_what_its_own_processor_makes_of_the_same_conversation(
    family: str, client: Client, reader: Reader, tiny_dir: Path, run: Run, tmp_path: Path
) -> None:
    folder = BUILDERS[family](tmp_path / "model") if family in BUILDERS else tiny_dir
    if family == "internvl":
        made = clips.make_images(client, folder, [image_of(size) for size in SIZES])
        asked = random_conversations(NUM_CONVERSATIONS, made.kinds)
    else:
        made = clips.make_clips(client, folder, tmp_path)
        asked = all_asked(made)
    engine, posed = unstarted_engine(folder), questions(asked, VERDICT)

    async def prompts() -> list[GenerateRequest]:
        requests: list[GenerateRequest] = []
        for question in posed:
            judge = Judge(question.spec, engine, client, reader, recipes=made.recipes)
            [[[vote]]] = await judge._votes([question.task(client, made)])
            assert not vote.is_final, vote.why
            requests += await judge._requests([vote], 0)
        return requests

    requests, read = run(prompts()), [question.read for question in posed]
    if family == "internvl":
        check_tiles(folder, read, requests)
    else:
        check_against_processor(folder, made, read, requests)


@pytest.mark.parity
def test_the_chance_of_yes_is_that_of_transformers_for_what_the_processor_makes(
    engine: VllmEngine, client: Client, reader: Reader, tiny_dir: Path, run: Run, tmp_path: Path
) -> None:
    made = clips.make_clips(client, tiny_dir, tmp_path)
    asked = questions(all_asked(made), VERDICT)
    for number in range(len(TEMPLATES)):
        alike = asked[number :: len(TEMPLATES)]
        judge = Judge(alike[0].spec, engine, client, reader, recipes=made.recipes)
        judged = run(judge.judge([question.task(client, made) for question in alike], as_batch=True))
        scores = [score for group in judged if group is not None and not group.num_failed for score in group.scores]
        wanted = chances_of_yes(tiny_dir, made, [question.read for question in alike], engine.tokenizer)
        assert scores == pytest.approx(wanted, abs=1e-4)


def chances_of_yes(model_dir: Path, made: clips.Clips, read: list[Asked], tokenizer: Any) -> list[float]:
    """Return p(yes) / (p(yes) + p(no)) of transformers' model for the token that follows each conversation."""
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    mean, std = (np.array(values)[:, None] for values in load_recipe(model_dir).pixel_affine(model_dir))
    yes, no = ([tokenizer(word)["input_ids"][0] for word in words] for words in (VERDICT.yes, VERDICT.no))
    found = []
    for one in read:
        inputs = clips.of_processor(model_dir, made, one)
        media = {name: torch.as_tensor(np.asarray(inputs[name])) for name in positions.GRIDS[:2] if name in inputs}
        for name in ("pixel_values", "pixel_values_videos"):
            if name in inputs:
                pixels = (np.asarray(inputs[name]).reshape(len(inputs[name]), 3, -1) / 255 - mean) / std
                media[name] = torch.from_numpy(pixels.reshape(inputs[name].shape).astype(np.float32))
        places = torch.from_numpy(positions.of_transformers(model_dir, inputs))[:, None]
        with torch.no_grad():
            logits = model(input_ids=torch.as_tensor(inputs["input_ids"]), position_ids=places, **media).logits
        chances = logits[0, -1].softmax(-1)
        found.append(float(chances[yes].sum() / chances[yes + no].sum()))
    return found


def test_a_judges_server_gets_the_same_conversation_with_the_encoded_media_at_their_places(
    client: Client, tiny_dir: Path, run: Run, tmp_path: Path
) -> None:
    made = clips.make_clips(client, tiny_dir, tmp_path)
    asked = [question for question in questions(all_asked(made), VERDICT) if question.spec.template.names_response]

    async def contents() -> list[list[dict[str, Any]]]:
        found = []
        for question in asked:
            remote = RemoteJudge(question.spec, server_at("http://nowhere/v1"), Reader(client.uri))
            task = question.task(client, made)
            found.append(remote._content(task, question.response, remote._media(task.group.media)))
            await remote.shutdown()
        return found

    for question, content in zip(asked, run(contents()), strict=True):
        places = iter(question.asked.places)
        (wanted,) = question.read.messages
        assert content == [
            part if part["type"] == "text" else sent(part["type"], made.encoded[next(places)])
            for part in wanted["content"]
        ]


def sent(kind: str, encoded: bytes) -> dict[str, Any]:
    mime = {"image": "image/png", "video": "video/mp4"}[kind]
    url = f"data:{mime};base64,{base64.b64encode(encoded).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
