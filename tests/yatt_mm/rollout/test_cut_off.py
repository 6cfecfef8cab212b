"""Tests of groups that are cut off and continued: no sampled token is lost, and each keeps the policy version that
sampled it."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dataplane.client.reader import Reader
from dataplane.core.refs import Ref
from tests.yatt_mm.rollout.conftest import Run, stored, tasks_for
from tests.yatt_mm.rollout.reference import of_transformers
from tests.yatt_mm.rollout.test_engine_updates import save_folder, update
from yatt_mm.common.conversation import ask
from yatt_mm.protocol.rollout import GroupRef, PromptTask, SamplingSettings
from yatt_mm.rollout.vllm_engine import VllmEngine
from yatt_mm.rollout.worker import RolloutWorker

NUM_BEFORE = 5
"""The number of tokens that every sample has at least when its group is cut off."""


async def have_begun(engine: VllmEngine, num_samples: int) -> None:
    """Wait until `num_samples` samples were sent and each running one has `NUM_BEFORE` tokens, in the engine's own
    count."""
    states = engine._llm.output_processor.request_states
    seen: set[str] = set()

    def num_tokens() -> list[int]:
        return [state.detokenizer.num_output_tokens() for state in states.values() if state.detokenizer]

    async with asyncio.timeout(60):
        while len(seen) < num_samples or min(num_tokens(), default=0) < NUM_BEFORE:
            seen.update(states)
            await asyncio.sleep(0)


async def cut_off(worker: RolloutWorker, task: PromptTask, sampling: SamplingSettings) -> GroupRef:
    """Return a group that `abort` ended in the middle of all its samples."""
    call = asyncio.create_task(worker.generate(task, sampling))
    await have_begun(worker.engine, task.num_samples)
    await worker.abort(["another task", task.name])
    async with asyncio.timeout(60):
        return await call


def test_tokens_of_a_group_that_goes_on_have_the_numbers_of_the_weights_that_gave_them(
    worker: RolloutWorker, reader: Reader, media: tuple[Ref, ...], run: Run, tiny_dir: Path, tmp_path: Path
) -> None:
    engine = worker.engine
    weights = load_file(tiny_dir / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    newer = {name: w + 0.05 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    folders = (tiny_dir, save_folder(tmp_path / "newer", tiny_dir, newer))
    task = dataclasses.replace(tasks_for(media, "updated")[2], num_samples=8)
    old = engine.policy_version

    async def cut_off_update_and_go_on() -> tuple[GroupRef, GroupRef, list[str]]:
        reported = [await engine._llm.get_weight_version()]
        first = await cut_off(worker, task, SamplingSettings(max_tokens=60))
        await update(engine, tmp_path / "policy", newer)
        reported.append(await engine._llm.get_weight_version())
        going_on = dataclasses.replace(task, name="updated/again", partial=first.ref)
        second = await worker.generate(going_on, SamplingSettings(max_tokens=60))
        await update(engine, tmp_path / "policy", weights)
        return first, second, reported

    first, second, reported = run(cut_off_update_and_go_on())
    assert reported == [str(old), str(old + 1)]
    before, after = stored(reader, first), stored(reader, second)
    assert second.ref.name == "updated/again" and first.finish_reasons.count("abort") >= 4
    assert set(second.finish_reasons) <= {"stop", "length"}
    for was, now, versions in zip(before.samples, after.samples, second.policy_versions, strict=True):
        num_before, num_after = len(was.token_ids), len(now.token_ids) - len(was.token_ids)
        is_cut = was.finish_reason == "abort"
        assert (num_before >= NUM_BEFORE and num_after > 0) if is_cut else num_after == 0
        assert now.token_ids[:num_before].tolist() == was.token_ids.tolist() and len(now.token_ids) <= 60
        assert now.policy_versions.tolist() == [old] * num_before + [old + 1] * num_after
        assert versions == (old, old + is_cut)
        assert now.text == engine.tokenizer.decode(now.token_ids.tolist(), skip_special_tokens=True)

    pad = engine.media_tokens.image  # transformers would look for a second image where one was sampled
    readable = [sample for sample in after.samples if pad not in sample.token_ids]
    assert {version for sample in readable for version in sample.policy_versions} == {old, old + 1}
    (patches,) = reader.resolve(task.media)
    responses = [sample.token_ids.tolist() for sample in readable]
    by_version = [of_transformers(folder, after.prompt_token_ids.tolist(), patches, responses) for folder in folders]
    for sample, of_old, of_new in zip(readable, *by_version, strict=True):
        is_old = sample.policy_versions == old
        assert sample.logprobs == pytest.approx(np.where(is_old, of_old, of_new), abs=1e-4)
        assert np.abs(np.subtract(of_old, of_new)).max() > 1e-2


def test_a_greedy_answer_that_was_cut_off_twice_is_the_one_that_was_not(
    worker: RolloutWorker, reader: Reader, media: tuple[Ref, ...], run: Run
) -> None:
    greedy = SamplingSettings(max_tokens=300, greedy=True)
    task = dataclasses.replace(tasks_for(media, "greedy")[1], num_samples=2)

    async def whole_and_in_parts() -> tuple[GroupRef, list[GroupRef]]:
        whole = await worker.generate(task, greedy)
        parts = [await cut_off(worker, dataclasses.replace(task, name="greedy/part 0"), greedy)]
        for again in (cut_off, lambda worker, *rest: worker.generate(*rest)):
            part = dataclasses.replace(task, name=f"greedy/part {len(parts)}", partial=parts[-1].ref)
            parts.append(await again(worker, part, greedy))
        return whole, parts

    whole, parts = run(whole_and_in_parts())
    assert 0 < parts[0].lengths[0] < parts[1].lengths[0] < parts[2].lengths[0] == whole.lengths[0]
    for found, wanted in zip(stored(reader, parts[2]).samples, stored(reader, whole).samples, strict=True):
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert (found.text, found.finish_reason) == (wanted.text, wanted.finish_reason)


def test_a_sleep_gives_what_was_sampled_and_a_sleeping_engine_gives_it_back(
    worker: RolloutWorker, reader: Reader, media: tuple[Ref, ...], run: Run
) -> None:
    long = SamplingSettings(max_tokens=1500)
    tasks = tasks_for(media[:3], "slept")

    async def sleep_and_wake() -> tuple[list[GroupRef], GroupRef, list[GroupRef]]:
        calls = [asyncio.create_task(worker.generate(task, long)) for task in tasks]
        await have_begun(worker.engine, 12)
        late = asyncio.create_task(worker.generate(dataclasses.replace(tasks[0], name="slept/late"), long))
        await worker.engine.sleep()
        try:
            async with asyncio.timeout(60):
                groups = await asyncio.gather(*calls)
                again = dataclasses.replace(tasks[0], name="slept/again", partial=groups[0].ref)
                asleep = [await late, await worker.generate(again, long)]
        finally:
            await worker.engine.wake_up()
        again = dataclasses.replace(again, name="slept/awake", partial=asleep[1].ref)
        return groups, await worker.generate(again, SamplingSettings(max_tokens=max(groups[0].lengths) + 3)), asleep

    groups, awake, (late, still) = run(sleep_and_wake())
    assert {reason for group in groups for reason in group.finish_reasons} <= {"abort", "stop"}
    assert "abort" in groups[0].finish_reasons
    assert (late.lengths, late.finish_reasons) == ((0,) * 4, ("abort",) * 4)
    assert (still.lengths, still.finish_reasons) == (groups[0].lengths, groups[0].finish_reasons)
    assert set(awake.finish_reasons) <= {"stop", "length"}
    parts = (stored(reader, group).samples for group in (groups[0], still, awake))
    for slept, kept, went_on in zip(*parts, strict=True):
        tokens = slept.token_ids.tolist()
        assert tokens == kept.token_ids.tolist() == went_on.token_ids[: len(tokens)].tolist()
        assert (len(went_on.token_ids) > len(tokens) >= NUM_BEFORE) == (slept.finish_reason == "abort")


def test_finished_and_full_samples_are_kept_and_only_the_others_are_sampled(
    worker: RolloutWorker, reader: Reader, media: tuple[Ref, ...], run: Run
) -> None:
    task = tasks_for(media, "kept")[0]

    async def first_and_again() -> tuple[list[GroupRef], list[float]]:
        done = await worker.generate(task, SamplingSettings(max_tokens=3))
        open_ended = await cut_off(
            worker, dataclasses.replace(task, name="kept/open"), SamplingSettings(max_tokens=1500)
        )
        counts = [worker.metrics()["num_tokens"]]
        groups = [done, open_ended]
        for name, partial in (("kept/done", done), ("kept/full", open_ended)):
            again = dataclasses.replace(task, name=name, partial=partial.ref)
            groups.append(await worker.generate(again, SamplingSettings(max_tokens=NUM_BEFORE)))
            counts.append(worker.metrics()["num_tokens"])
        again = dataclasses.replace(task, name="kept/batch", partial=open_ended.ref)
        batch = [again, tasks_for(media, "kept/fresh")[1], dataclasses.replace(again, name="kept/batch full")]
        groups += await worker.generate_batch(batch[:2], SamplingSettings(max_tokens=max(open_ended.lengths) + 2))
        groups += await worker.generate_batch(batch[2:], SamplingSettings(max_tokens=NUM_BEFORE))
        return groups, counts

    (done, open_ended, kept, full, going_on, fresh, unasked), counts = run(first_and_again())
    assert len(set(counts)) == 1, "nothing was sampled where nothing was left to do"
    assert (kept.lengths, kept.finish_reasons) == (done.lengths, done.finish_reasons)
    assert "abort" in open_ended.finish_reasons
    assert full.finish_reasons == tuple("length" if why == "abort" else why for why in open_ended.finish_reasons)
    assert unasked.lengths == full.lengths == open_ended.lengths
    assert set(going_on.finish_reasons) <= {"stop", "length"} and len(fresh.lengths) == 4
    for was, now in zip(stored(reader, open_ended).samples, stored(reader, going_on).samples, strict=True):
        assert now.token_ids[: len(was.token_ids)].tolist() == was.token_ids.tolist()
        assert (len(now.token_ids) > len(was.token_ids)) == (was.finish_reason == "abort")


def test_a_group_that_is_cut_off_before_it_was_sent_has_no_token_and_starts_anew(
    worker: RolloutWorker, reader: Reader, media: tuple[Ref, ...], run: Run
) -> None:
    task = tasks_for(media, "early")[4]

    async def at_once() -> list[GroupRef]:
        call = asyncio.create_task(worker.generate(task, SamplingSettings(max_tokens=1500)))
        await worker.abort([task.name])  # before the task runs for the first time
        async with asyncio.timeout(60):
            cut = await call
        again = dataclasses.replace(task, name="early/again", partial=cut.ref)
        fresh = dataclasses.replace(task, name="early/fresh")
        batches = [await worker.generate_batch([either], SamplingSettings(max_tokens=4)) for either in (again, fresh)]
        return [cut, *batches[0], *batches[1]]

    cut, again, fresh = run(at_once())
    assert (cut.lengths, cut.finish_reasons) == ((0,) * 4, ("abort",) * 4)
    assert set(cut.policy_versions) == {(worker.engine.policy_version,) * 2}
    for found, wanted in zip(stored(reader, again).samples, stored(reader, fresh).samples, strict=True):
        assert found.token_ids.tolist() == wanted.token_ids.tolist()


def test_a_partial_record_of_another_task_is_refused(worker: RolloutWorker, media: tuple[Ref, ...], run: Run) -> None:
    task = tasks_for(media, "other")[0]
    done = run(worker.generate(task, SamplingSettings(max_tokens=1)))
    wrong = dataclasses.replace(task, name="other/wrong", partial=done.ref)
    with pytest.raises(ValueError, match=r"other/wrong wants 3 samples .* has 4 .* \(the same ids\)"):
        run(worker.generate(dataclasses.replace(wrong, num_samples=3), SamplingSettings(max_tokens=1)))
    with pytest.raises(ValueError, match=r"other/wrong wants 4 samples .* has 4 .* \(other ids\)"):
        run(
            worker.generate(
                dataclasses.replace(wrong, conversation=ask("Which?", ["image"])), SamplingSettings(max_tokens=1)
            )
        )
