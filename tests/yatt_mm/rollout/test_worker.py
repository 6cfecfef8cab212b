"""Tests that prompt tasks become stored groups, through a real data plane and a real engine."""

import asyncio
import dataclasses
import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.errors import MissingObjectError
from dataplane.core.refs import ArraySpec, Ref
from tests.yatt_mm.rollout.conftest import Prompts, Run, stored, tasks_for
from yatt_mm.common.conversation import ask
from yatt_mm.protocol.rollout import GroupRef, SamplingSettings
from yatt_mm.rollout.continuation import sample_seed
from yatt_mm.rollout.worker import RolloutWorker

SAMPLING = SamplingSettings(max_tokens=3)


def test_a_group_is_stored_under_its_name_with_the_tokens_that_the_engine_was_given(
    worker: RolloutWorker, reader: Reader, media: tuple[Ref, ...], prompts: Prompts, run: Run
) -> None:
    task = tasks_for(media, "one")[3]
    group = run(worker.generate(task, SAMPLING))
    found = stored(reader, group)
    assert group.slot == 3 and group.ref.name == "one/3" and group.media == task.media
    assert found.prompt_token_ids.tolist() == list(prompts.token_ids)
    assert group.num_prompt_tokens == len(prompts.token_ids)
    assert group.lengths == tuple(len(sample.token_ids) for sample in found.samples)
    assert group.finish_reasons == tuple(sample.finish_reason for sample in found.samples)
    assert set(group.policy_versions) == {(worker.engine.policy_version,) * 2}
    assert len(found.samples) == 4
    assert worker.metrics()["num_tokens"] == sum(group.lengths)


def test_a_batch_is_stored_the_same_again_and_its_patches_are_those_of_the_data_plane(
    worker: RolloutWorker, reader: Reader, media: tuple[Ref, ...], run: Run
) -> None:
    first = run(worker.generate_batch(tasks_for(media, "first"), SAMPLING))
    second = run(worker.generate_batch(tasks_for(media, "second"), SAMPLING))
    for before, after in zip(first, second, strict=True):
        found, wanted = stored(reader, after), stored(reader, before)
        for sample, wanted_sample in zip(found.samples, wanted.samples, strict=True):
            assert np.array_equal(sample.token_ids, wanted_sample.token_ids)
            assert np.array_equal(sample.logprobs, wanted_sample.logprobs)
    assert worker.metrics()["num_groups"] == 12


def test_groups_that_begin_together_resolve_their_media_in_one_call_and_a_lost_medium_fails_its_own_group_alone(
    worker: RolloutWorker, client: Client, media: tuple[Ref, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    resolve = worker._reader.resolve

    def counted(refs: Sequence[Ref]) -> list[np.ndarray]:
        asked.append(len(refs))
        return resolve(refs)

    monkeypatch.setattr(worker._reader, "resolve", counted)
    lost = client.put(b"gone", name="lost/partial")
    client.release([lost])
    good = tasks_for(media, "together")
    bad = dataclasses.replace(good[0], name="together/lost", partial=lost)

    async def generate() -> list[GroupRef | BaseException]:
        calls = (worker.generate(task, SAMPLING) for task in (bad, *good))
        return await asyncio.gather(*calls, return_exceptions=True)

    gc.disable()
    try:
        failed, *groups = run(generate())
        assert isinstance(failed, MissingObjectError)
        del failed
        deadline = time.monotonic() + 10
        while client.stat()["num_leases"] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert client.stat()["num_leases"] == 0, "a cycle of references keeps views until they are collected"
    finally:
        gc.enable()
    assert all(isinstance(group, GroupRef) for group in groups)
    assert asked == [7, *[1] * 7]  # together, and then each alone


def test_groups_that_end_together_are_stored_in_one_call(
    worker: RolloutWorker, media: tuple[Ref, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_in_one: list[int] = []
    put_many = worker._client.put_many

    def counted(specs: Sequence[ArraySpec], data: Sequence[Any], **kwargs: Any) -> list[Ref]:
        stored_in_one.append(len(specs))
        return put_many(specs, data, **kwargs)

    monkeypatch.setattr(worker._client, "put_many", counted)
    groups = run(worker.generate_batch(tasks_for(media, "one call"), SAMPLING))
    assert stored_in_one == [len(groups)]


def test_no_lease_is_held_while_the_engine_computes(
    worker: RolloutWorker, client: Client, media: tuple[Ref, ...], run: Run
) -> None:
    async def leases_in_flight() -> int:
        task = dataclasses.replace(tasks_for(media, "long")[0], num_samples=8)
        rollout = asyncio.create_task(worker.generate(task, SamplingSettings(max_tokens=1500)))
        async with asyncio.timeout(60):
            while not worker.engine.num_in_flight:
                await asyncio.sleep(0)
            num_leases = 1
            while num_leases and not rollout.done():
                num_leases = int((await asyncio.to_thread(client.stat))["num_leases"])
        assert not rollout.done()
        rollout.cancel()
        await asyncio.gather(rollout, return_exceptions=True)
        return num_leases

    assert run(leases_in_flight()) == 0


def test_media_that_the_engine_dropped_are_resolved_and_sent_again(
    worker: RolloutWorker, media: tuple[Ref, ...], run: Run
) -> None:
    task = tasks_for(media, "dropped")[0]
    run(worker.generate(task, SAMPLING))
    run(worker.engine._llm.engine_core.reset_mm_cache_async())
    group = run(worker.generate(dataclasses.replace(task, name="dropped/again"), SAMPLING))
    assert len(group.lengths) == 4
    run(worker.generate(dataclasses.replace(task, name="dropped/thrice"), SAMPLING))
    run(worker.engine._llm.engine_core.reset_mm_cache_async())
    run(worker.generate_batch(tasks_for(media, "dropped/batch"), SAMPLING))
    assert worker.metrics()["num_resent"] == 2


def test_tasks_that_make_no_sense_are_refused_by_name(
    worker: RolloutWorker, client: Client, media: tuple[Ref, ...], run: Run
) -> None:
    task = tasks_for(media, "wrong")[0]
    plain = client.put(b"x", name="no patches")
    with pytest.raises(ValueError, match=r"ref no patches \(plain\) has no num_tokens"):
        run(worker.generate(dataclasses.replace(task, media=(plain,)), SAMPLING))
    with pytest.raises(ValueError, match="wrote placeholders for image, image into the prompt"):
        run(worker.generate(dataclasses.replace(task, conversation=ask("<|image_pad|>?", ["image"])), SAMPLING))


def test_seeds_differ_between_samples_and_groups_and_never_change() -> None:
    seeds = [sample_seed(group, sample) for group in range(50) for sample in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(7, 3) == 989480759
