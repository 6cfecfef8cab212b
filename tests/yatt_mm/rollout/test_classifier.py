"""Tests of a discriminative reward model as a judge: its scores equal transformers', and it sleeps and resends like
other judges."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from models.qwen2_5_vl.recipe import patch_recipe
from tests.yatt_mm.rollout.classifiers import build_classifier, logits_of_transformers
from tests.yatt_mm.rollout.conftest import Run, engine_config
from tests.yatt_mm.rollout.families import build_served_folder
from tests.yatt_mm.rollout.test_judge import judge_of, make_group, store_group, task_for
from yatt_mm.genrm.judge import Judge
from yatt_mm.protocol.genrm import JudgedGroup, JudgeSpec, JudgeTask
from yatt_mm.protocol.judge_template import CONVERSATION, JudgeTemplate
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.protocol.verdicts import LabelScore
from yatt_mm.rollout.vllm_engine import VllmEngine

pytestmark = pytest.mark.parity

TEXTS = ("3", "7", "it is 7<|im_end|>")
SPEC = JudgeSpec(name="head", template=JudgeTemplate(CONVERSATION, needs_response=False), verdict=LabelScore())


@pytest.fixture(scope="module")
def folder(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_classifier(tiny_dir, tmp_path_factory.mktemp("models") / "classifier")


@pytest.fixture(scope="module")
def classifier(folder: Path, run: Run) -> Iterator[VllmEngine]:
    engine = run(VllmEngine.start(engine_config(folder, name="classifier", num_labels=1, reload_on_wake=True)))
    yield engine
    run(engine.shutdown())


@pytest.fixture(scope="module")
def with_image(client: Client, tiny_dir: Path) -> GroupRef:
    return make_group(client, patch_recipe(tiny_dir), side=56, texts=TEXTS, number=1)


@pytest.fixture
def judge(classifier: VllmEngine, client: Client, reader: Reader, folder: Path) -> Judge:
    return judge_of(SPEC, classifier, client, reader, folder)


def without_image(client: Client) -> GroupRef:
    return store_group(client, (), TEXTS, slot=1)


def conversations(engine: VllmEngine, *, num_image_tokens: int) -> list[list[int]]:
    """Return the token ids of the conversations that the model must be shown."""
    image = f"<|vision_start|>{'<|image_pad|>' * num_image_tokens}<|vision_end|>" if num_image_tokens else ""
    return [
        engine.tokenizer(
            f"<|im_start|>user\n{image}What digit is this?<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n",
            add_special_tokens=False,
        )["input_ids"]
        for text in (text.replace("<|im_end|>", "< |im_end|>") for text in TEXTS)
    ]


def check_scores(
    judge: Judge, source: Path, folder: Path, group: GroupRef, reader: Reader, run: Run, *, label: int = 0
) -> None:
    """Check that the scores are the label's logits, for each group alone and for several together."""
    patches = reader.resolve(group.media)[0] if group.media else None
    prompts = conversations(judge.engine, num_image_tokens=4 if group.media else 0)
    wanted = [logits[label] for logits in logits_of_transformers(source, folder, prompts, patches)]
    assert max(wanted) - min(wanted) > 0.1, "the answers must differ for this to show anything"
    for as_batch in (False, True):
        (judged,) = run(judge.judge([task_for(group)], as_batch=as_batch))
        assert judged is not None
        assert judged.scores == pytest.approx(wanted, abs=1e-4)
        assert (judged.num_failed, judged.num_retried) == (0, 0)


def test_the_score_is_the_head_times_the_last_hidden_state_of_the_conversation_with_its_image(
    judge: Judge, tiny_dir: Path, folder: Path, with_image: GroupRef, reader: Reader, run: Run
) -> None:
    before = judge.engine.num_ipc_bytes
    check_scores(judge, tiny_dir, folder, with_image, reader, run)
    assert judge.engine.num_ipc_bytes - before == with_image.media[0].nbytes, "the image was sent once, for all answers"


def test_a_question_without_an_image_is_scored_alike(
    judge: Judge, client: Client, tiny_dir: Path, folder: Path, reader: Reader, run: Run
) -> None:
    check_scores(judge, tiny_dir, folder, without_image(client), reader, run)


def test_an_activation_makes_a_probability_and_a_threshold_a_choice(
    judge: Judge, classifier: VllmEngine, client: Client, reader: Reader, folder: Path, with_image: GroupRef, run: Run
) -> None:
    tasks = [task_for(with_image)]
    (plain,) = run(judge.judge(tasks))
    spec = dataclasses.replace(SPEC, verdict=LabelScore(activation="sigmoid"))
    (likely,) = run(judge_of(spec, classifier, client, reader, folder).judge(tasks))
    assert likely.scores == pytest.approx([1 / (1 + np.exp(-score)) for score in plain.scores], abs=1e-4)
    middle = float(np.mean(sorted(plain.scores)[-2:]))
    spec = dataclasses.replace(SPEC, threshold=middle)
    (cut,) = run(judge_of(spec, classifier, client, reader, folder).judge(tasks))
    assert sorted(cut.scores) == [0.0, 0.0, 1.0]


def test_a_template_that_names_the_answer_is_one_turn(judge: Judge, with_image: GroupRef) -> None:
    spec = dataclasses.replace(SPEC, template=JudgeTemplate("{question} {response}", needs_response=False))
    judge._spec = spec
    (vote,) = judge._votes_on(task_for(dataclasses.replace(with_image, media=())), "it is 7", (), 0)
    wanted = "<|im_start|>user\nWhat digit is this? it is 7<|im_end|>\n<|im_start|>assistant\n"
    assert vote.prompt == judge.engine.tokenizer(wanted, add_special_tokens=False)["input_ids"]


def test_a_batch_is_the_same_bit_for_bit_whatever_came_before(judge: Judge, client: Client, run: Run) -> None:
    tasks = [task_for(without_image(client))] * 3
    wanted = run(judge.judge(tasks, as_batch=True))
    run(judge.judge(tasks[:1]))
    assert run(judge.judge(tasks, as_batch=True)) == wanted


def test_what_a_classifier_sleeps_over_is_scored_as_ever_once_it_wakes(
    judge: Judge, with_image: GroupRef, run: Run
) -> None:
    engine, task = judge.engine, task_for(with_image)

    async def sleep_and_wake() -> tuple[list[JudgedGroup | None], list[JudgedGroup | None]]:
        await engine._llm.pause_generation(mode="keep", clear_cache=False)  # so that the work lasts until the sleep
        call = asyncio.create_task(judge.judge([task]))
        async with asyncio.timeout(60):
            while engine.num_in_flight < len(TEXTS):
                await asyncio.sleep(0)
        await engine.sleep()
        try:
            async with asyncio.timeout(60):
                return await call, await judge.judge([task])
        finally:
            await engine.wake_up()

    (wanted,) = run(judge.judge([task]))
    assert run(sleep_and_wake()) == ([None], [None])
    (found,) = run(judge.judge([task]))
    assert wanted is not None and found is not None
    assert (found.num_failed, found.scores) == (0, pytest.approx(wanted.scores, abs=1e-4))


@pytest.mark.parametrize("as_batch", [False, True])
def test_media_that_the_engine_dropped_are_sent_again(
    as_batch: bool, judge: Judge, with_image: GroupRef, run: Run
) -> None:
    tasks: list[JudgeTask] = [task_for(with_image)]
    (wanted,) = run(judge.judge(tasks))
    run(judge.engine.reset_caches())
    run(judge.judge(tasks))
    run(judge.engine._llm.engine_core.reset_mm_cache_async())  # the core forgets; the frontend does not know
    run(judge.engine._llm.reset_encoder_cache())
    run(judge.engine._llm.reset_prefix_cache())
    before = judge.engine.num_ipc_bytes
    (found,) = run(judge.judge(tasks, as_batch=as_batch))
    assert judge.engine.num_ipc_bytes > before
    assert wanted is not None and found is not None
    assert (found.num_failed, found.scores) == (0, pytest.approx(wanted.scores, abs=1e-4))


def test_a_label_of_several_of_another_family(
    client: Client, reader: Reader, with_image: GroupRef, run: Run, tmp_path: Path
) -> None:
    source = build_served_folder(tmp_path / "qwen3", seed=0)
    folder = build_classifier(source, tmp_path / "classifier", num_labels=3)
    spec = dataclasses.replace(SPEC, verdict=LabelScore(label=2))
    engine = run(VllmEngine.start(engine_config(folder, name="three", num_labels=3)))
    try:
        judge = judge_of(spec, engine, client, reader, folder)
        check_scores(judge, source, folder, with_image, reader, run, label=2)
    finally:
        run(engine.shutdown())
