"""Tests of a real vLLM engine: its inputs, its outputs, and that equal requests give equal outputs."""

import asyncio
import dataclasses
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from models.qwen2_5_vl.recipe import pixel_affine
from tests.yatt_mm.rollout.conftest import GRID, Prompts, Run
from yatt_mm.rollout.engine_types import EngineAsleepError, EngineError, EngineTimeoutError, MediaDroppedError
from yatt_mm.rollout.vllm_engine import GenerateRequest, Medium, Sampled, VllmEngine


def test_a_group_has_one_sample_for_each_seed(engine: VllmEngine, prompts: Prompts, run: Run) -> None:
    group = run(engine.generate(prompts.request(1, num_samples=6)))
    assert len(group) == 6
    assert len({sampled.token_ids for sampled in group}) > 1
    for sampled in group:
        assert len(sampled.token_ids) == len(sampled.logprobs) == len(sampled.policy_versions) <= 3
        assert sampled.finish_reason == ("length" if len(sampled.token_ids) == 3 else "stop")
        assert sampled.text == engine.tokenizer.decode(sampled.token_ids, skip_special_tokens=True)
        assert set(sampled.policy_versions) == {engine.policy_version}


def test_the_same_batch_gives_the_same_bits_whatever_came_before(
    engine: VllmEngine, prompts: Prompts, run: Run
) -> None:
    images = list(range(20))
    first = run(engine.generate_batch(prompts.requests(images)))
    assert run(engine.generate_batch(prompts.requests(images))) == first

    async def other_history() -> list[list[Sampled]]:
        await engine.reset_caches()
        await asyncio.gather(*(engine.generate(request) for request in prompts.requests([7, 3, 99, 1])))
        return await engine.generate_batch(prompts.requests(images))

    assert run(other_history()) == first


def test_prompts_prepared_at_the_same_time_in_another_order_give_the_same_bits(
    engine: VllmEngine, prompts: Prompts, run: Run
) -> None:
    async def prepared_in(order: list[int]) -> list[list[Sampled]]:
        prepared: dict[int, GenerateRequest] = {}

        async def prepare(image: int) -> None:
            await asyncio.sleep(0)
            prepared[image] = await asyncio.to_thread(prompts.request, image)

        await engine.reset_caches()
        await asyncio.gather(*(prepare(image) for image in order))
        return await engine.generate_batch([prepared[image] for image in range(8)])

    assert run(prepared_in([5, 2, 7, 0, 1, 6, 3, 4])) == run(prepared_in(list(range(8))))


def test_a_sample_depends_on_its_own_seed(engine: VllmEngine, prompts: Prompts, run: Run) -> None:
    request = prompts.request(1, num_samples=6, max_tokens=8)
    (group,) = run(engine.generate_batch([request]))
    swapped = dataclasses.replace(request, seeds=request.seeds[::-1])
    (reverse,) = run(engine.generate_batch([swapped]))
    assert [s.token_ids for s in reverse] == [s.token_ids for s in group][::-1]


def test_greedy_answers_are_the_most_likely_ones_whatever_the_seed(
    engine: VllmEngine, prompts: Prompts, run: Run
) -> None:
    group = run(engine.generate(prompts.request(1, greedy=True)))
    assert len({sampled.token_ids for sampled in group}) == 1


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_a_limit_that_leaves_one_token_gives_the_greedy_answer(
    engine: VllmEngine, prompts: Prompts, run: Run, limit: dict[str, Any]
) -> None:
    greedy = run(engine.generate(prompts.request(1, num_samples=1, greedy=True)))[0]
    free, limited = (prompts.request(1, num_samples=4, **settings) for settings in ({}, limit))
    assert {sampled.token_ids for sampled in run(engine.generate(limited))} == {greedy.token_ids}
    assert {sampled.token_ids for sampled in run(engine.generate(free))} != {greedy.token_ids}


def test_a_text_that_ends_responses_ends_them_and_stays(engine: VllmEngine, prompts: Prompts, run: Run) -> None:
    def text_of(token_ids: Sequence[int]) -> str:
        return str(engine.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    whole = run(engine.generate(prompts.request(1, num_samples=1, greedy=True, max_tokens=24)))[0]
    texts = [text_of(whole.token_ids[:count]) for count in range(25)]
    stop = next(text[-1] for text in texts[6:] if text[-1].isascii())  # not a part of a character
    wanted = next(count for count, text in enumerate(texts) if stop in text)
    request = prompts.request(1, num_samples=2, greedy=True, max_tokens=24, stop=("never said", stop))
    for sampled in run(engine.generate(request)):
        assert (sampled.token_ids, sampled.finish_reason) == (whole.token_ids[:wanted], "stop")
        assert sampled.text == text_of(sampled.token_ids) and stop in sampled.text
        assert sampled.logprobs == pytest.approx(whole.logprobs[:wanted], abs=1e-5)
    (batch,) = run(engine.generate_batch([request]))
    assert [sampled.token_ids for sampled in batch] == [whole.token_ids[:wanted]] * 2


def test_a_medium_crosses_to_the_engine_process_once(engine: VllmEngine, prompts: Prompts, run: Run) -> None:
    nbytes = prompts.request(1).media[0].patches.nbytes
    before = engine.num_ipc_bytes
    run(engine.generate(prompts.request(1, num_samples=8)))
    assert engine.num_ipc_bytes - before == nbytes
    run(engine.generate_batch(prompts.requests([1, 2, 1])))
    assert engine.num_ipc_bytes - before == 2 * nbytes
    run(engine.reset_caches())
    run(engine.generate(prompts.request(1)))
    assert engine.num_ipc_bytes - before == 3 * nbytes


def test_media_that_the_engine_process_dropped_are_sent_again_on_request(
    engine: VllmEngine, prompts: Prompts, run: Run
) -> None:
    wanted = run(engine.generate(prompts.request(1, greedy=True)))
    run(engine._llm.engine_core.reset_mm_cache_async())  # the core forgets; the frontend does not know
    with pytest.raises(MediaDroppedError, match=r"engine shared .* image-1; send the request once more"):
        run(engine.generate(prompts.request(1, greedy=True)))
    found = run(engine.generate(prompts.request(1, greedy=True)))
    assert [s.token_ids for s in found] == [s.token_ids for s in wanted]


def test_views_are_let_go_once_they_were_sent(engine: VllmEngine, prompts: Prompts, run: Run) -> None:
    async def is_let_go_while_in_flight() -> bool:
        request = prompts.request(1, num_samples=1, max_tokens=1500)
        patches = weakref.ref(request.media[0].patches)
        task = asyncio.create_task(engine.generate(request))
        del request
        async with asyncio.timeout(30):
            while patches() is not None and not task.done():
                await asyncio.sleep(0.001)
        was_in_flight = not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return was_in_flight and patches() is None

    assert run(is_let_go_while_in_flight())


def test_logprobs_equal_those_of_transformers(engine: VllmEngine, prompts: Prompts, tiny_dir: Path, run: Run) -> None:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    differences = []
    for temperature in (1.0, 0.7):
        request = prompts.request(3, num_samples=8, max_tokens=12, temperature=temperature)
        for sampled in run(engine.generate(request)):
            differences.append(
                np.abs(_reference_logprobs(model, tiny_dir, request, sampled, temperature) - sampled.logprobs)
            )
    difference = np.concatenate(differences)
    assert difference.mean() < 1e-5
    assert difference.max() < 1e-4


def _reference_logprobs(
    model: Any, model_dir: Path, request: GenerateRequest, sampled: Sampled, temperature: float
) -> np.ndarray:
    mean, std = (torch.tensor(values).view(1, 3, 1) for values in pixel_affine(model_dir))
    patches = torch.tensor(request.media[0].patches).float() / 255
    pixels = ((patches.view(16, 3, -1) - mean) / std).view(16, -1)
    ids = torch.tensor([[*request.prompt_token_ids, *sampled.token_ids]])
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            pixel_values=pixels,
            image_grid_thw=torch.tensor([GRID]),
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
        ).logits[0]
    start = len(request.prompt_token_ids) - 1
    logprobs = (logits[start:-1] / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(sampled.token_ids)[:, None])[:, 0].numpy()


def test_more_prompt_tokens_than_one_step_takes_are_answered_from_seeds(
    engine: VllmEngine, prompts: Prompts, run: Run
) -> None:
    text = [60 + index % 200 for index in range(700)]
    requests = [
        dataclasses.replace(request, prompt_token_ids=[*request.prompt_token_ids, 60 + image, *text])
        for image, request in enumerate(prompts.requests(range(20), num_samples=2))
    ]
    first = run(engine.generate_batch(requests))
    assert [len(group) for group in first] == [2] * 20
    assert run(engine.generate_batch(requests)) == first


def test_requests_that_make_no_sense_are_refused_and_harm_nothing(
    engine: VllmEngine, prompts: Prompts, run: Run
) -> None:
    good = prompts.request(1)
    medium = good.media[0]
    floats = dataclasses.replace(medium, patches=np.zeros((16, 1176), np.float32), digest="floats")
    bigger = Medium(digest="bigger", patches=np.zeros((64, 1176), np.uint8), grid_thw=(1, 8, 8))
    wrong = {
        "wanted uint8": dataclasses.replace(good, media=(floats,)),
        "needs 16 placeholder tokens": dataclasses.replace(good, media=(bigger,)),
        "needs 4 placeholder tokens": dataclasses.replace(good, media=(medium, medium)),
        "has 3 images and rollout.max_images_per_prompt is 2": dataclasses.replace(good, media=(medium,) * 3),
        "4 placeholder tokens more": dataclasses.replace(good, prompt_token_ids=good.prompt_token_ids * 2),
        "exceed max_model_len 2048": dataclasses.replace(good, media=(), prompt_token_ids=[50] * 3000),
    }
    for message, request in wrong.items():
        with pytest.raises(ValueError, match=message):
            run(engine.generate(request))
        with pytest.raises(ValueError, match=message):
            run(engine.generate_batch([good, request]))
    assert len(run(engine.generate(good))) == 4


def test_a_late_answer_names_engine_and_seconds_and_the_engine_goes_on(
    engine: VllmEngine, prompts: Prompts, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine._health, "timeout_s", 0.2)
        with pytest.raises(
            EngineTimeoutError,
            match=r"engine shared finished nothing for 0\.2 s while it had a group of 4 to .* \(4 samples",
        ):
            run(engine.generate(prompts.request(1, max_tokens=1800)))
    assert len(run(engine.generate_batch([prompts.request(1)]))) == 1


def test_a_batch_wants_an_engine_with_nothing_in_flight(engine: VllmEngine, prompts: Prompts, run: Run) -> None:
    async def batch_beside_a_stream() -> None:
        stream = asyncio.create_task(engine.generate(prompts.request(1, max_tokens=40)))
        while not engine.num_in_flight:
            await asyncio.sleep(0)
        try:
            with pytest.raises(EngineError, match="4 samples in flight"):
                await engine.generate_batch([prompts.request(2)])
        finally:
            await stream

    run(batch_beside_a_stream())


def test_an_engine_that_sleeps_refuses_work_and_answers_as_before_when_woken(
    engine: VllmEngine, prompts: Prompts, run: Run
) -> None:
    before = run(engine.generate_batch([prompts.request(1)]))
    run(engine.sleep())
    run(engine.sleep())
    with pytest.raises(EngineAsleepError, match="engine shared is asleep; call wake_up"):
        run(engine.generate(prompts.request(1)))
    run(engine.wake_up())
    assert run(engine.generate_batch([prompts.request(1)])) == before


def test_an_engine_that_is_told_to_settle_while_it_wakes_up_sleeps_afterwards(engine: VllmEngine, run: Run) -> None:
    async def settle_in_the_middle() -> None:
        await engine.sleep()
        waking = asyncio.create_task(engine.wake_up())
        while not engine._sending.locked():
            await asyncio.sleep(0)
        await engine.settle()
        await waking
        with pytest.raises(EngineAsleepError):
            engine._check_usable()
        await engine.wake_up()

    run(settle_in_the_middle())


def test_falling_asleep_ends_what_is_in_flight(engine: VllmEngine, prompts: Prompts, run: Run) -> None:
    async def sleep_in_the_middle() -> list[Sampled]:
        task = asyncio.create_task(engine.generate(prompts.request(1, num_samples=1, max_tokens=1500)))
        while not engine.num_in_flight:
            await asyncio.sleep(0)
        await engine.sleep()
        await engine.wake_up()
        return await task

    assert {sampled.finish_reason for sampled in run(sleep_in_the_middle())} == {"abort"}
