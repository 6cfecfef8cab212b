"""Images and videos in a real data plane: as engine and trainer get them, and as transformers makes them.

The frames have a size that both processors keep, so no resize makes a difference between ours and transformers'.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.refs import Ref
from dataplane.media.kinds import MediaKind
from dataplane.media.videos import Video
from models.recipes.media_recipes import MediaRecipes, VideoSampling, load_recipes
from tests.dataplane.clips import encode_video, moving
from tests.yatt_mm.rollout.conversations import Asked
from yatt_mm.common.media_refs import derive_media, kind_of
from yatt_mm.rollout.engine_media import medium_of, size_of
from yatt_mm.rollout.engine_types import MediaTokens
from yatt_mm.rollout.prompt_template import PromptTemplate
from yatt_mm.rollout.vllm_engine import GenerateRequest
from yatt_mm.training.train_sample import TrainSample

SAMPLING = VideoSampling(fps=7.0, min_pixels=28 * 28, max_pixels=2**24)
QUESTION = "What is in the picture?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clips:
    """Encoded media by number, and their patches for one model."""

    encoded: tuple[bytes, ...]
    refs: tuple[Ref, ...]
    """The refs of the derived patches."""
    recipes: MediaRecipes

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds of the media."""
        return tuple(map(kind_of, self.refs))


def make_clips(client: Client, model_dir: Path, folder: Path) -> Clips:
    """Make an image, a video of 12 frames, a video of 5 frames (the last is repeated), and another image."""
    encoded = (
        _png(_noise(0)),
        encode_video(folder / "long.mp4", "mp4v", moving(12, 56, 56), fps=8.0),
        encode_video(folder / "short.mp4", "mp4v", moving(5, 84, 56), fps=10.0),
        _png(_noise(1)),
    )
    recipes = load_recipes(model_dir, SAMPLING)
    kinds = ("image", "video", "video", "image")
    sources = [
        client.put_source(data, meta={"medium": kind, "number": number})
        for number, (data, kind) in enumerate(zip(encoded, kinds, strict=True))
    ]
    refs = derive_media(client, sources, recipes)
    return Clips(encoded=encoded, refs=tuple(ref for ref in refs if isinstance(ref, Ref)), recipes=recipes)


def make_images(client: Client, model_dir: Path, images: Sequence[Image.Image]) -> Clips:
    """Make these images for a model that takes no videos."""
    encoded = tuple(map(_png, images))
    recipes = load_recipes(model_dir)
    sources = [client.put_source(data, meta={"medium": "image", "number": n}) for n, data in enumerate(encoded)]
    refs = derive_media(client, sources, recipes)
    return Clips(encoded=encoded, refs=tuple(ref for ref in refs if isinstance(ref, Ref)), recipes=recipes)


def request_for(clips: Clips, asked: Asked, tokenizer: Any, tokens: MediaTokens, reader: Reader) -> GenerateRequest:
    """Return a request for two responses to a conversation."""
    refs = [clips.refs[place] for place in asked.places]
    return GenerateRequest(
        prompt_token_ids=PromptTemplate(tokenizer, tokens).token_ids(
            asked.conversation, [size_of(ref) for ref in refs]
        ),
        media=tuple(medium_of(ref, view) for ref, view in zip(refs, reader.resolve(refs), strict=True)),
        seeds=(1, 2),
        max_tokens=6,
    )


def train_sample(request: GenerateRequest, sampled: Sequence[int] = ()) -> TrainSample:
    """Return the same prompt with a response in the form for the trainer, patches included."""
    num_prompt = len(request.prompt_token_ids)
    return TrainSample(
        token_ids=np.array([*request.prompt_token_ids, *sampled], dtype=np.int64),
        loss_mask=np.arange(num_prompt + len(sampled)) >= num_prompt,
        grid_thw=tuple(medium.grid_thw for medium in request.media),
        seconds_per_grid=tuple(medium.seconds_per_grid for medium in request.media),
        patches=tuple(np.array(medium.patches) for medium in request.media),
        media_keys=tuple(medium.digest for medium in request.media),
    )


def of_processor(model_dir: Path, clips: Clips, asked: Asked) -> Any:
    """Return what transformers' processor makes of the same conversation, images and frames."""
    processor = _processor(model_dir)
    text = processor.apply_chat_template(
        asked.messages, add_generation_prompt=asked.messages[-1]["role"] != "assistant", tokenize=False
    )
    images = [clips.encoded[place] for place in asked.places if clips.kinds[place] == "image"]
    videos = [place for place in asked.places if clips.kinds[place] == "video"]
    metas = [clips.refs[place].meta for place in videos]
    return processor(
        text=[text],
        images=[Image.open(io.BytesIO(data)) for data in images] or None,
        videos=[_frames(clips.encoded[place], clips.refs[place]) for place in videos] or None,
        video_metadata=[
            VideoMetadata(
                total_num_frames=meta["total_num_frames"],
                fps=meta["video_fps"],
                frames_indices=list(meta["frame_indices"]),
            )
            for meta in metas
        ],
        do_sample_frames=False,
        do_rescale=False,
        do_normalize=False,
        size={"shortest_edge": SAMPLING.min_pixels, "longest_edge": SAMPLING.max_pixels},
        return_tensors="np",
    )


@cache
def _processor(model_dir: Path) -> Any:
    return AutoProcessor.from_pretrained(model_dir)


def _frames(data: bytes, ref: Ref) -> np.ndarray:
    return np.stack(list(Video(data).frames(ref.meta["frame_indices"]))).transpose(0, 3, 1, 2)


def _noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8))


def _png(image: Image.Image) -> bytes:
    png = io.BytesIO()
    image.save(png, format="PNG")
    return png.getvalue()
