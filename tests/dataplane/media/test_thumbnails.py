"""Tests of the kernels that make small pictures for people: they open everywhere, fit, and look like their medium."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.errors import BadRequestError
from dataplane.core.refs import Ref
from dataplane.media.recipes import parse_recipe
from dataplane.media.videos import Video
from tests.dataplane.clips import encode_video, moving
from tests.dataplane.shards import noise


def thumbnail(source: Any, kernel: str = "thumbnail", **fields: int) -> bytes:
    plan = parse_recipe({"kernel": kernel, "version": 1, **fields}).plan(source)
    out = np.empty(math.prod(plan.shape), np.uint8)
    plan.write(out)
    return out.tobytes()


def opened(file: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(file))
    image.load()
    assert image.format == "JPEG"
    return image


@settings(max_examples=25, deadline=None)
@given(height=st.integers(1, 700), width=st.integers(1, 700), side=st.integers(8, 512), room=st.integers(1024, 16384))
def test_any_image_fits_into_its_bytes_and_its_side(height: int, width: int, side: int, room: int) -> None:
    file = thumbnail(Image.fromarray(noise(0, height, width)), max_side=side, max_bytes=room)
    assert len(file) <= room and max(opened(file).size) <= side


def test_a_picture_with_room_keeps_its_size_and_looks_like_its_medium() -> None:
    steps = np.add.outer(np.arange(90), np.arange(120))[..., None].repeat(3, axis=2).astype(np.uint8)
    seen = np.asarray(opened(thumbnail(Image.fromarray(steps))))
    assert seen.shape == steps.shape and np.abs(seen.astype(int) - steps).mean() < 1.0


def test_a_video_is_a_strip_of_frames_from_its_first_to_its_last(tmp_path: Path) -> None:
    frames = moving(9, 48, 64)
    video = Video(encode_video(tmp_path / "clip.avi", "MJPG", frames))
    strip = np.asarray(opened(thumbnail(video, "video_thumbnail", max_bytes=1 << 16)))
    assert strip.shape == (48, 4 * 64, 3)
    for place, wanted in enumerate((0, 3, 5, 8)):
        cut = strip[:, place * 64 : (place + 1) * 64].astype(int)
        differences = [np.abs(cut - frame).mean() for frame in video.frames(range(9))]
        assert int(np.argmin(differences)) == wanted


def test_a_strip_that_no_jpeg_can_hold_is_refused_as_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="16 frames of up to 4096 pixels are wider than a JPEG may be"):
        parse_recipe({"kernel": "video_thumbnail", "version": 1, "num_frames": 16, "max_side": 4096})
    frames = moving(16, 8, 4096)
    video = Video(encode_video(tmp_path / "clip.avi", "MJPG", frames))
    assert opened(thumbnail(video, "video_thumbnail", num_frames=15, max_side=4096)).width <= 65500


@pytest.mark.parametrize("fields", [{"max_bytes": 100}, {"max_side": 4}, {"quality": 3}])
def test_limits_that_make_no_sense_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(BadRequestError, match=next(iter(fields))):
        parse_recipe({"kernel": "thumbnail", "version": 1, **fields})


def test_a_node_makes_them_and_does_not_count_them_among_the_media_of_models(client: Client, reader: Reader) -> None:
    source = client.samples("good", [4])[0].media
    before = client.stat()
    (ref,) = client.derive(source, {"kernel": "thumbnail", "version": 1})
    assert isinstance(ref, Ref) and opened(reader.resolve([ref])[0].tobytes()).size == (56, 56)
    after = client.stat()
    assert after["num_thumbnails"] == before["num_thumbnails"] + 1
    unchanged = ("num_media", "num_processed", "num_recomputed", "processed_bytes")
    assert [after[name] for name in unchanged] == [before[name] for name in unchanged]
