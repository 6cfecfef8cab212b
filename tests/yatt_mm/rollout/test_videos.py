"""Tests of videos of the data plane in real engines: ids and patches equal the processor's, log-probabilities equal the
trainer's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from models.recipes.media_recipes import MediaRecipes
from tests.yatt_mm.rollout import clips
from tests.yatt_mm.rollout.agreement.checks import all_asked, check_against_processor, check_against_trainer
from tests.yatt_mm.rollout.conftest import Run
from tests.yatt_mm.rollout.conversations import plain
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.common.conversation import ask
from yatt_mm.common.media_refs import derive_media
from yatt_mm.protocol import group_record
from yatt_mm.protocol.rollout import PromptTask, SamplingSettings
from yatt_mm.rollout.video_times import engine_seconds
from yatt_mm.rollout.vllm_engine import VllmEngine
from yatt_mm.rollout.worker import RolloutWorker


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with EmbeddedNode(memory_bytes=64 * 2**20, roots={}, num_workers=1) as node, Client(node.uri) as client:
        yield client


@pytest.fixture(scope="module")
def reader(client: Client) -> Iterator[Reader]:
    with Reader(client.uri) as reader:
        yield reader


@pytest.fixture(scope="module")
def qwen2_5(client: Client, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> clips.Clips:
    return clips.make_clips(client, tiny_dir, tmp_path_factory.mktemp("clips"))


def test_qwen2_5_vl_sees_videos_as_its_processor_and_its_trainer_do(
    engine: VllmEngine, client: Client, reader: Reader, tiny_dir: Path, qwen2_5: clips.Clips, run: Run, ranks: RankPool
) -> None:
    asked = all_asked(qwen2_5)
    requests = [clips.request_for(qwen2_5, one, engine.tokenizer, engine.media_tokens, reader) for one in asked]
    check_against_processor(tiny_dir, qwen2_5, asked, requests)
    groups = run(engine.generate_batch(requests))
    check_against_trainer(ranks, tiny_dir, requests, groups)
    still = dataclasses.replace(requests[0].media[0], digest="still", patches=np.zeros((80, 1176), np.uint8))
    (other,) = run(engine.generate_batch([dataclasses.replace(requests[0], media=(still,))]))
    assert other[0].logprobs != groups[0][0].logprobs


def test_a_task_with_videos_is_stored_with_the_same_tokens_and_refs(
    engine: VllmEngine, client: Client, reader: Reader, tiny_dir: Path, qwen2_5: clips.Clips, run: Run
) -> None:
    refs = tuple(qwen2_5.refs[place] for place in (2, 3, 1))
    asked = ask(clips.QUESTION, ["video", "image", "video"])
    task = PromptTask(slot=0, conversation=asked, media=refs, num_samples=3, seed=1, name="videos/0")
    worker = RolloutWorker(engine, client, reader)
    before = engine.num_ipc_bytes
    group = run(worker.generate(task, SamplingSettings(max_tokens=3)))
    (view,) = reader.resolve([group.ref])
    wanted = clips.of_processor(tiny_dir, qwen2_5, plain(clips.QUESTION, (2, 3, 1), qwen2_5.kinds))["input_ids"][0]
    assert group_record.decode(view).prompt_token_ids.tolist() == wanted.tolist()
    assert group.media == refs and group.num_prompt_tokens == len(wanted)
    assert engine.num_ipc_bytes - before == sum(ref.nbytes for ref in refs), "once for all samples"


def test_videos_that_do_not_fit_are_refused_by_name(
    engine: VllmEngine, reader: Reader, qwen2_5: clips.Clips, run: Run
) -> None:
    asked = plain(clips.QUESTION, (1,), qwen2_5.kinds)
    request = clips.request_for(qwen2_5, asked, engine.tokenizer, engine.media_tokens, reader)
    (medium,) = request.media
    with pytest.raises(ValueError, match=r"has 3 videos and rollout\.max_videos_per_prompt is 2"):
        run(engine.generate(dataclasses.replace(request, media=(medium,) * 3)))
    taller = dataclasses.replace(medium, grid_thw=(medium.grid_thw[0], 8, 4), patches=np.tile(medium.patches, (2, 1)))
    with pytest.raises(ValueError, match=r"\(video, grid .* needs 40 placeholder"):
        run(engine.generate(dataclasses.replace(request, media=(taller,))))
    as_image = dataclasses.replace(medium, kind="image")
    with pytest.raises(ValueError, match=r"\(image, grid .* needs 20 placeholder"):
        run(engine.generate(dataclasses.replace(request, media=(as_image,))))


def test_a_model_without_videos_has_them_set_aside(client: Client, qwen2_5: clips.Clips) -> None:
    images_only = MediaRecipes(image=qwen2_5.recipes.image)
    image, video = derive_media(client, qwen2_5.refs[:2], images_only)
    assert image == qwen2_5.refs[0]
    assert "it is a video, and the model's family takes none" in video.reason  # type: ignore[union-attr]


@given(
    num_frames=st.integers(2, 300),
    total=st.integers(300, 5000),
    rate=st.sampled_from([10.0, 12.0, 23.976, 25.0, 30.0]),
    tokens_per_second=st.sampled_from([2.0, 4.0]),
)
@example(num_frames=235, total=300, rate=30.0, tokens_per_second=2.0)  # 8 / 47 of a position from frame to frame
def test_the_engine_is_told_a_time_that_is_hardly_another(
    num_frames: int, total: int, rate: float, tokens_per_second: float
) -> None:
    seconds = 2 / (num_frames / total * rate)
    assert engine_seconds(seconds, num_frames // 2, tokens_per_second) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize(("seconds", "num_steps"), [(0.7, 40), (0.35, 80), (1 / 3, 90)])
def test_nearly_whole_positions_are_rounded_as_the_trainer_rounds_them(seconds: float, num_steps: int) -> None:
    steps = np.arange(num_steps)
    trainer = (steps.astype(np.float32) * np.float32(2.0 * seconds)).astype(np.int64)
    assert ((steps * (engine_seconds(seconds, num_steps, 2.0) * 2.0)).astype(np.int64) == trainer).all()
