"""Tests of replacing the weights in a running engine: the engine equals a fresh one, and would be wrong if a cache were
kept."""

import asyncio
import pickle
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.layout.parallel import Parallel
from tests.yatt_mm.rollout.conftest import Prompts, Run, engine_config
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import DEADLINE_S, RankPool
from yatt_mm.protocol.published import Published
from yatt_mm.rollout.vllm_engine import EngineError, Sampled, VllmEngine
from yatt_mm.weights.segment_writer import write_segment

IMAGES = range(12)


@pytest.fixture(scope="module")
def weights(tiny_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_dir / "model.safetensors")


@pytest.fixture(scope="module")
def other_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: w + 0.05 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def save_folder(directory: Path, source: Path, weights: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def publish(engine: VllmEngine, path: Path, weights: dict[str, torch.Tensor]) -> None:
    version = engine.policy_version + 1
    write_segment(path, weights.items(), version=version)
    await engine.update_weights(Published(version=version, path=str(path)))


async def update(engine: VllmEngine, path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Publish the weights and load them. Then overwrite what was published, because the engine must not read it any
    more."""
    await publish(engine, path, weights)
    write_segment(path, [(name, torch.full_like(weight, 1e3)) for name, weight in weights.items()], version=99)


@pytest.fixture(scope="module")
def fresh(
    tiny_dir: Path,
    other_weights: dict[str, torch.Tensor],
    prompts: Prompts,
    run: Run,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[list[Sampled]]:
    """The responses of an engine that was loaded from a folder with the other weights."""
    folder = save_folder(tmp_path_factory.mktemp("fresh") / "model", tiny_dir, other_weights)

    async def answers() -> list[list[Sampled]]:
        engine = await VllmEngine.start(engine_config(folder, name="fresh"))
        try:
            return await engine.generate_batch(prompts.requests(IMAGES, max_tokens=8))
        finally:
            await engine.shutdown()

    return run(answers())


def answers(groups: list[list[Sampled]]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(sampled.token_ids, sampled.logprobs) for group in groups for sampled in group]


def check_close(
    found: list[tuple[tuple[int, ...], tuple[float, ...]]], wanted: list[tuple[tuple[int, ...], tuple[float, ...]]]
) -> None:
    """Check that the tokens are the same, and the log-probabilities too, except for rounding."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, logprobs), (_, wanted_logprobs) in zip(found, wanted, strict=True):
        assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)


def test_after_an_update_the_engine_equals_a_freshly_loaded_one(
    engine: VllmEngine,
    prompts: Prompts,
    run: Run,
    fresh: list[list[Sampled]],
    weights: dict[str, torch.Tensor],
    other_weights: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    requests = prompts.requests(IMAGES, max_tokens=8)
    before = run(engine.generate_batch(requests))  # its caches have now seen every image
    version = engine.policy_version
    run(update(engine, tmp_path / "policy", other_weights))
    streamed = run(_stream(engine, prompts))
    batched = run(engine.generate_batch(prompts.requests(IMAGES, max_tokens=8)))
    run(update(engine, tmp_path / "policy", weights))
    restored = run(engine.generate_batch(requests))

    assert answers(batched) == answers(fresh)
    check_close(answers(streamed), answers(fresh))
    assert {v for group in batched for sampled in group for v in sampled.policy_versions} == {version + 1}
    assert answers(restored) == answers(before)


def test_an_engine_that_shares_no_memory_with_the_trainer_equals_a_freshly_loaded_one(
    engine: VllmEngine,
    prompts: Prompts,
    run: Run,
    ranks: RankPool,
    fresh: list[list[Sampled]],
    weights: dict[str, torch.Tensor],
    other_weights: dict[str, torch.Tensor],
    tiny_dir: Path,
    tmp_path: Path,
) -> None:
    folder = save_folder(tmp_path / "model", tiny_dir, other_weights)
    announced, version = tmp_path / "stream", engine.policy_version + 1
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(ranks.run, 2, jobs.stream, folder, Parallel(tp=2), str(announced), version)
        deadline = time.monotonic() + DEADLINE_S
        while not announced.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
            if sending.done():
                sending.result()
        stream = pickle.loads(announced.read_bytes())
        run(engine.update_weights(Published(version=version, path="", stream=stream)))
        sending.result()
    sent = run(engine.generate_batch(prompts.requests(IMAGES, max_tokens=8)))
    run(update(engine, tmp_path / "policy", weights))
    assert answers(sent) == answers(fresh)


@pytest.mark.parity
def test_an_engine_over_two_devices_equals_one_on_a_single_device_and_reads_dropped_weights_again_when_it_wakes(
    tiny_dir: Path,
    prompts: Prompts,
    run: Run,
    fresh: list[list[Sampled]],
    weights: dict[str, torch.Tensor],
    other_weights: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    """Test an engine that reads its weights again when it wakes up. While it sleeps, other weights are written: first
    to its model folder, and after an update to the weight segment."""
    before = set(Path("/dev/shm").glob("vllm_dist_*"))
    folder = save_folder(tmp_path / "model", tiny_dir, weights)
    policy = tmp_path / "policy"

    async def awoken() -> list[list[list[Sampled]]]:
        engine = await VllmEngine.start(engine_config(folder, name="two", tensor_parallel_size=2, reload_on_wake=True))

        async def generate() -> list[list[Sampled]]:
            return await engine.generate_batch(prompts.requests(IMAGES, max_tokens=8))

        try:
            await engine.sleep()
            save_folder(tmp_path / "other", tiny_dir, other_weights)
            (tmp_path / "other" / "model.safetensors").replace(folder / "model.safetensors")
            await engine.wake_up()
            read = await generate()
            await update(engine, policy, weights)
            updated = await generate()
            await engine.sleep()
            write_segment(policy, other_weights.items(), version=engine.policy_version)
            await engine.wake_up()
            return [read, updated, await generate()]
        finally:
            await engine.shutdown()

    from_folder, updated, from_segment = map(answers, run(awoken()))
    assert not [path for path in Path("/dev/shm").glob("vllm_dist_*") if path not in before]
    assert updated != from_folder == from_segment
    check_close(from_folder, answers(fresh))


async def _stream(engine: VllmEngine, prompts: Prompts) -> list[list[Sampled]]:
    return list(await asyncio.gather(*map(engine.generate, prompts.requests(IMAGES, max_tokens=8))))


def test_with_a_kept_encoder_cache_the_answers_would_be_wrong(
    engine: VllmEngine,
    prompts: Prompts,
    run: Run,
    fresh: list[list[Sampled]],
    weights: dict[str, torch.Tensor],
    other_weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def keep() -> None:
        """Keep the cache, as if its reset were forgotten."""

    run(engine.generate_batch(prompts.requests(IMAGES, max_tokens=8)))
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_encoder_cache", keep)
        run(update(engine, tmp_path / "policy", other_weights))
        stale = run(_stream(engine, prompts))
    run(update(engine, tmp_path / "policy", weights))
    differences = [
        abs(found - wanted)
        for (_, found_logprobs), (_, wanted_logprobs) in zip(answers(stale), answers(fresh), strict=True)
        for found, wanted in zip(found_logprobs[:1], wanted_logprobs[:1], strict=True)
    ]
    assert max(differences) > 1e-3


def test_tokens_sampled_across_an_update_carry_the_version_that_gave_them(
    engine: VllmEngine,
    prompts: Prompts,
    run: Run,
    weights: dict[str, torch.Tensor],
    other_weights: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    """Test against the responses without an update: they are the same as long as tokens have the old version, and no
    longer from the first token of the new one on."""

    async def update_in_the_middle() -> list[Sampled]:
        task = asyncio.create_task(engine.generate(prompts.request(1, num_samples=8, max_tokens=1500)))
        while engine.num_in_flight < 8:
            await asyncio.sleep(0)
        await engine.generate(prompts.request(2, num_samples=1, max_tokens=1))  # those before it have a token then
        await update(engine, tmp_path / "policy", other_weights)
        return await task

    old = engine.policy_version
    found = run(update_in_the_middle())
    run(update(engine, tmp_path / "policy", weights))
    num_old = [sampled.policy_versions.count(old) for sampled in found]
    unbroken = run(engine.generate(prompts.request(1, num_samples=8, max_tokens=max(num_old) + 1)))
    differ = []
    for sampled, plain, num in zip(found, unbroken, num_old, strict=True):
        num_new = len(sampled.token_ids) - num
        assert list(sampled.policy_versions) == [old] * num + [old + 1] * num_new
        assert sampled.token_ids[:num] == plain.token_ids[:num]
        assert sampled.logprobs[:num] == pytest.approx(plain.logprobs[:num], abs=1e-4)
        if num and num_new:
            is_other_token = sampled.token_ids[num] != plain.token_ids[num]
            differ.append(is_other_token or abs(sampled.logprobs[num] - plain.logprobs[num]) > 1e-3)
    assert differ and sum(differ) > len(differ) / 2, "the first new token may be as likely as before by chance"


def test_weights_may_be_replaced_while_the_engine_sleeps(
    engine: VllmEngine, prompts: Prompts, run: Run, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    before = run(engine.generate_batch([prompts.request(1)]))
    run(engine.sleep())
    run(update(engine, tmp_path / "policy", weights))
    with pytest.raises(EngineError, match="asleep"):
        run(engine.generate(prompts.request(1)))
    run(engine.wake_up())
    assert answers(run(engine.generate_batch([prompts.request(1)]))) == answers(before)


class DeviceMemory:
    """The memory that an engine on a GPU would hold, by vLLM's tags.

    The engine itself runs on the CPU and gets the same calls. vLLM frees nothing there.
    """

    def __init__(self, engine: VllmEngine) -> None:
        from vllm.device_allocator import DEFERRABLE_TAGS

        self._tags = set(DEFERRABLE_TAGS)
        self.awake = set(self._tags)
        self.levels: list[int] = []
        self._sleep, self._wake_up = engine._llm.sleep, engine._llm.wake_up

    async def sleep(self, level: int, mode: Any) -> None:
        self.levels.append(level)
        self.awake.clear()
        await self._sleep(level=0, mode=mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.awake |= set(tags or self._tags) & self._tags  # vLLM ignores others
        if tags is None:
            await self._wake_up(tags=["scheduling"])


def test_an_update_of_a_sleeping_engine_wakes_its_weights_alone_and_they_can_sleep_again(
    engine: VllmEngine,
    prompts: Prompts,
    run: Run,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = run(engine.generate_batch([prompts.request(1)]))
    memory = DeviceMemory(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine._backend, "is_cpu", lambda: False)
        patch.setattr(engine._llm, "sleep", memory.sleep)
        patch.setattr(engine._llm, "wake_up", memory.wake_up)
        held = []
        for change in (
            engine.sleep,
            lambda: publish(engine, tmp_path / "policy", weights),
            engine.sleep,
            engine.wake_up,
        ):
            run(change())
            held.append(set(memory.awake))
    assert held == [set(), {"weights"}, set(), {"weights", "kv_cache"}]
    assert memory.levels == [2, 2], "the folder, and then the segment, can be read again"
    assert answers(run(engine.generate_batch([prompts.request(1)]))) == answers(before)
