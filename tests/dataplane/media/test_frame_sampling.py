"""Tests which frames are sampled and what sizes they get, against transformers' video processors."""

import types
from typing import Any

import pytest
from msgspec import convert

import models  # noqa: F401  transformers' Qwen2-VL code imports torchvision, which needs this on a CPU
from dataplane.media.recipes.frame_sampling import Sampling, sample
from dataplane.media.recipes.resizing import resize_image, resize_video

pytestmark = pytest.mark.torch

TOTALS = [*range(4, 70), 99, 100, 240, 241, 899, 1000, 3001]


def take(total: int, video_fps: float, multiple: int = 2, **sampling: Any) -> tuple[int, ...]:
    return sample(convert(sampling, Sampling), total, video_fps, multiple).indices


def transformers_indices(rule: str, total: int, video_fps: float, **options: Any) -> list[int]:
    pytest.importorskip("torch")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    kind: Any = {"qwen2_vl": Qwen2VLVideoProcessor, "qwen3_vl": Qwen3VLVideoProcessor}[rule]
    bounds = {key: options[key] for key in ("min_frames", "max_frames") if key in options}
    processor = types.SimpleNamespace(num_frames=None, fps=None, min_frames=4, max_frames=768, temporal_patch_size=2)
    vars(processor).update(bounds)
    asked = {key: value for key, value in options.items() if key in ("fps", "num_frames")}
    return kind.sample_frames(processor, VideoMetadata(total_num_frames=total, fps=video_fps), **asked).tolist()


@pytest.mark.parametrize("video_fps", [10.0, 25.0, 30000 / 1001])
@pytest.mark.parametrize("fps", [0.5, 1.0, 2.0, 24.0])
@pytest.mark.parametrize("rule", ["qwen2_vl", "qwen3_vl"])
def test_frames_by_rate_are_those_of_transformers(rule: str, fps: float, video_fps: float) -> None:
    for total in TOTALS:
        for bounds in ({"min_frames": 4, "max_frames": 768}, {"min_frames": 2, "max_frames": 10}):
            ours = take(total, video_fps, by="fps", rule=rule, fps=fps, **bounds)
            theirs = transformers_indices(rule, total, video_fps, fps=fps, **bounds)
            assert_near(ours, theirs, total, rule)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 8, 15, 32])
@pytest.mark.parametrize("rule", ["qwen2_vl", "qwen3_vl"])
def test_frames_by_count_are_those_of_transformers(rule: str, num_frames: int) -> None:
    for total in TOTALS:
        rounded = round(num_frames / 2) * 2
        if rule == "qwen2_vl" and not 0 < rounded <= total:
            assert take(total, 10.0, by="count", rule=rule, num_frames=num_frames) == tuple(range(total))
            continue
        ours = take(total, 10.0, by="count", rule=rule, num_frames=num_frames)
        assert_near(ours, transformers_indices(rule, total, 10.0, num_frames=num_frames), total, rule)


def assert_near(ours: tuple[int, ...], theirs: list[int], total: int, rule: str) -> None:
    """Check that both are equal. A small difference is allowed, because torch's arange in float32 may skip an integer
    or give one frame too many."""
    if rule == "qwen3_vl":
        assert list(ours) == theirs, total
        return
    assert len(theirs) - len(ours) in (0, 1), (total, ours, theirs)
    assert all(0 <= mine - other <= 1 for mine, other in zip(ours, theirs, strict=False)), (total, ours, theirs)
    exact = [at * total / len(ours) for at in range(len(ours))]
    assert all(int(value + 1e-9) == mine for value, mine in zip(exact, ours, strict=True))


def test_a_range_is_sampled_as_if_the_video_were_no_longer() -> None:
    part = take(100, 10.0, by="count", rule="qwen3_vl", num_frames=5, start_s=2.0, end_s=4.1)
    assert part == (20, 25, 30, 35, 40)
    assert take(100, 10.0, by="count", rule="qwen2_vl", num_frames=4, start_s=0.3, end_s=0.7) == (3, 4, 5, 6)
    assert take(100, 10.0, by="fps", rule="qwen2_vl", fps=2.0, start_s=5.0) == tuple(range(50, 100, 5))
    assert take(100, 10.0, by="count", rule="qwen2_vl", num_frames=2, end_s=1e6) == (0, 50)
    with pytest.raises(ValueError, match=r"no frame from 11.0 s to the end: it has 10 s"):
        take(100, 10.0, by="count", rule="qwen2_vl", num_frames=4, start_s=11.0)


def test_a_video_shorter_than_a_temporal_patch_is_taken_whole() -> None:
    assert take(1, 10.0, by="fps", rule="qwen2_vl", fps=2.0) == (0,)
    assert take(1, 10.0, by="fps", rule="qwen3_vl", fps=2.0) == (0,)
    assert take(3, 10.0, by="count", rule="qwen2_vl", num_frames=8) == (0, 1, 2)


def test_times_are_those_that_the_processors_compute() -> None:
    pytest.importorskip("torch")
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.video_utils import VideoMetadata

    checked = convert({"by": "count", "rule": "qwen3_vl", "num_frames": 5}, Sampling)
    for total, video_fps in ((25, 10.0), (100, 30000 / 1001)):
        taken = sample(checked, total, video_fps, 2)
        theirs = VideoMetadata(total_num_frames=total, fps=video_fps, frames_indices=list(taken.indices))
        assert taken.timestamps == theirs.timestamps and taken.fps == theirs.sampled_fps
        assert taken.meta()["duration"] == total / video_fps
        grid = Qwen3VLProcessor._calculate_timestamps(None, list(taken.indices), video_fps, 2)  # type: ignore[arg-type]
        assert taken.grid_timestamps(2) == grid and len(grid) == 3


@pytest.mark.parametrize("num_frames", [2, 3, 4, 9, 64])
def test_sizes_are_those_of_transformers(num_frames: int) -> None:
    pytest.importorskip("torch")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize as per_frame
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as per_video

    for height, width in ((8, 8), (20, 300), (48, 64), (480, 640), (1080, 1920), (33, 1000)):
        for least, most in ((56 * 56, 256 * 256), (128 * 32 * 32, 32 * 32 * 768), (4 * 28 * 28, 28 * 28 * 768)):
            assert resize_image(height, width, 28, least, most) == per_frame(height, width, 28, least, most)
            ours = resize_video(num_frames, 2, height, width, 32, least, most)
            assert ours == per_video(num_frames, height, width, 2, 32, least, most)
