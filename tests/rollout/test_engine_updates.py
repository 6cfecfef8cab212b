"""Weights replaced in a running engine: as good as a fresh one, and wrong if a cache were kept."""

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rollout.conftest import Prompts, Run, engine_config
from yatt_mm.rollout.engine import Engine, EngineError, Sampled
from yatt_mm.weights.segment import write_segment

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


def segment(path: Path, weights: dict[str, torch.Tensor]) -> str:
    named = list(weights.items())
    return write_segment(path, [named[:10], named[10:]]).path


@pytest.fixture(scope="module")
def fresh(
    tiny_dir: Path,
    other_weights: dict[str, torch.Tensor],
    prompts: Prompts,
    run: Run,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[list[Sampled]]:
    """What an engine answers that was loaded from a folder with the other weights."""
    folder = save_folder(tmp_path_factory.mktemp("fresh") / "model", tiny_dir, other_weights)

    async def answers() -> list[list[Sampled]]:
        engine = await Engine.start(engine_config(folder, name="fresh"))
        try:
            return await engine.generate_batch(prompts.requests(IMAGES, max_tokens=8))
        finally:
            await engine.shutdown()

    return run(answers())


def answers(groups: list[list[Sampled]]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(sampled.token_ids, sampled.logprobs) for group in groups for sampled in group]


def test_after_an_update_the_engine_equals_a_freshly_loaded_one(
    engine: Engine,
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
    run(engine.update_weights(segment(tmp_path / "v1", other_weights), version + 1))
    streamed = run(_stream(engine, prompts))
    batched = run(engine.generate_batch(prompts.requests(IMAGES, max_tokens=8)))
    run(engine.update_weights(segment(tmp_path / "v2", weights), version + 2))
    restored = run(engine.generate_batch(requests))

    assert answers(batched) == answers(fresh)
    assert [tokens for tokens, _ in answers(streamed)] == [tokens for tokens, _ in answers(fresh)]
    for (_, found), (_, wanted) in zip(answers(streamed), answers(fresh), strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    assert {v for group in batched for sampled in group for v in sampled.policy_versions} == {version + 1}
    assert answers(restored) == answers(before)


async def _stream(engine: Engine, prompts: Prompts) -> list[list[Sampled]]:
    return list(await asyncio.gather(*map(engine.generate, prompts.requests(IMAGES, max_tokens=8))))


def test_with_a_kept_encoder_cache_the_answers_would_be_wrong(
    engine: Engine,
    prompts: Prompts,
    run: Run,
    fresh: list[list[Sampled]],
    weights: dict[str, torch.Tensor],
    other_weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def keep() -> None:
        """Stands for a forgotten reset."""

    run(engine.generate_batch(prompts.requests(IMAGES, max_tokens=8)))
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_encoder_cache", keep)
        run(engine.update_weights(segment(tmp_path / "other", other_weights), 1))
        stale = run(_stream(engine, prompts))
    run(engine.update_weights(segment(tmp_path / "first", weights), engine.policy_version + 1))
    differences = [
        abs(found - wanted)
        for (_, found_logprobs), (_, wanted_logprobs) in zip(answers(stale), answers(fresh), strict=True)
        for found, wanted in zip(found_logprobs[:1], wanted_logprobs[:1], strict=True)
    ]
    assert max(differences) > 1e-3


def test_tokens_sampled_across_an_update_carry_the_version_that_gave_them(
    engine: Engine,
    prompts: Prompts,
    run: Run,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    async def update_in_the_middle() -> list[Sampled]:
        task = asyncio.create_task(engine.generate(prompts.request(1, num_samples=2, max_tokens=800)))
        while not engine.num_in_flight:
            await asyncio.sleep(0)
        await engine.update_weights(segment(tmp_path / "same", weights), engine.policy_version + 1)
        return await task

    old = engine.policy_version
    for sampled in run(update_in_the_middle()):
        assert len(sampled.policy_versions) == len(sampled.token_ids)
        assert list(sampled.policy_versions) == sorted(sampled.policy_versions)
        assert set(sampled.policy_versions) <= {old, old + 1}


def test_weights_may_be_replaced_while_the_engine_sleeps(
    engine: Engine, prompts: Prompts, run: Run, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    before = run(engine.generate_batch([prompts.request(1)]))
    run(engine.sleep())
    run(engine.update_weights(segment(tmp_path / "same", weights), engine.policy_version + 1))
    with pytest.raises(EngineError, match="asleep"):
        run(engine.generate(prompts.request(1)))
    run(engine.wake_up())
    assert answers(run(engine.generate_batch([prompts.request(1)]))) == answers(before)
