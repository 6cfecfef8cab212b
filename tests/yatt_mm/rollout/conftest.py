"""Fixtures with one real vLLM engine and one data plane for the whole folder, because starting an engine takes longer
than all tests."""

import asyncio
import io
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.refs import Ref
from models.qwen2_5_vl.recipe import patch_recipe
from yatt_mm.common.conversation import ask
from yatt_mm.protocol import group_record
from yatt_mm.protocol.rollout import GroupRef, PromptTask
from yatt_mm.rollout.vllm_engine import EngineConfig, GenerateRequest, Medium, VllmEngine
from yatt_mm.rollout.worker import RolloutWorker

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

GRID = (1, 4, 4)
NUM_IMAGE_TOKENS = 4
QUESTION = "What digit is this?"


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Makes requests about random images."""

    token_ids: tuple[int, ...]

    def request(self, image: int, *, num_samples: int = 4, max_tokens: int = 3, **settings: Any) -> GenerateRequest:
        """Return a request. The same number `image` gives the same image and seeds."""
        patches = np.random.default_rng(image).integers(0, 256, (16, 1176), dtype=np.uint8)
        return GenerateRequest(
            prompt_token_ids=self.token_ids,
            media=(Medium(digest=f"image-{image}", patches=patches, grid_thw=GRID),),
            seeds=tuple(1000 * image + index for index in range(num_samples)),
            max_tokens=max_tokens,
            **settings,
        )

    def requests(self, images: Sequence[int], **settings: Any) -> list[GenerateRequest]:
        return [self.request(image, **settings) for image in images]


@pytest.fixture(scope="session")
def prompts(tiny_dir: Path) -> Prompts:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    pads = "<|image_pad|>" * NUM_IMAGE_TOKENS
    text = (
        f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>What digit is this?<|im_end|>\n<|im_start|>assistant\n"
    )
    return Prompts(token_ids=tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """A function that runs a coroutine on the one event loop that the shared engine belongs to."""
    with asyncio.Runner() as runner:
        yield runner.run


def engine_config(model_dir: Path, **changes: Any) -> EngineConfig:
    """Return settings for an engine that is small enough for every test, with a context that is long enough for tests
    that stop requests."""
    return EngineConfig(
        model_dir=str(model_dir),
        max_model_len=2048,
        kv_cache_bytes=2**26,
        max_images_per_prompt=2,
        max_videos_per_prompt=2,
        **changes,
    )


@pytest.fixture(scope="session")
def shared_engine(tiny_dir: Path, run: Run) -> Iterator[VllmEngine]:
    engine = run(VllmEngine.start(engine_config(tiny_dir, name="shared")))
    yield engine
    run(engine.shutdown())


@pytest.fixture
def engine(shared_engine: VllmEngine, run: Run) -> VllmEngine:
    """The shared engine with empty caches."""
    run(shared_engine.reset_caches())
    return shared_engine


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    with EmbeddedNode(memory_bytes=64 * 2**20, roots={}, num_workers=1) as node, Client(node.uri) as client:
        yield client


@pytest.fixture(scope="session")
def reader(client: Client) -> Iterator[Reader]:
    with Reader(client.uri) as reader:
        yield reader


@pytest.fixture(scope="session")
def media(client: Client, tiny_dir: Path) -> tuple[Ref, ...]:
    """The derived patches of a few random images."""
    sources = []
    for seed in range(6):
        pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, format="PNG")
        sources.append(client.put_source(png.getvalue()))
    refs = client.derive(sources, patch_recipe(tiny_dir))
    assert all(isinstance(ref, Ref) for ref in refs)
    return tuple(ref for ref in refs if isinstance(ref, Ref))


@pytest.fixture
def worker(engine: VllmEngine, client: Client, reader: Reader) -> RolloutWorker:
    return RolloutWorker(engine, client, reader)


def tasks_for(media: tuple[Ref, ...], prefix: str) -> list[PromptTask]:
    return [
        PromptTask(
            slot=slot,
            conversation=ask(QUESTION, ["image"]),
            media=(ref,),
            num_samples=4,
            seed=slot,
            name=f"{prefix}/{slot}",
        )
        for slot, ref in enumerate(media)
    ]


def stored(reader: Reader, group: GroupRef) -> group_record.GroupRecord:
    (view,) = reader.resolve([group.ref])
    return group_record.decode(view)
