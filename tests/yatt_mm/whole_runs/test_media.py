"""Tests a run in bfloat16 of three controllers, on samples with two images or a video: the pixels pass through it, and
no controller grows. The vision tower is frozen: a processor without bfloat16 needs minutes for its gradients."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from safetensors.torch import load_file

from examples.digits.model import build_model_folder
from examples.motion.prepare import TOKENIZER_TEXT
from tests.dataplane.clips import encode_video
from tests.yatt_mm import runs
from yatt_mm.keeper.table import read_rows, table_path

pytestmark = pytest.mark.alone

NUM_TRAIN, NUM_EVAL, NUM_STEPS, NUM_PROMPTS = 96, 6, 3, 32
SIDE, NUM_FRAMES = 224, 4
MIB = 2**20


def write_shard(path: Path, num_samples: int, *, seed: int) -> None:
    """Write samples of noise, by turns with two images and with one video."""
    draw = np.random.default_rng(seed)
    with webdataset.TarWriter(str(path)) as shard:
        for number in range(num_samples):
            sample: dict[str, object] = {
                "__key__": f"{number:06d}",
                "json": {"question": "What is it?", "answer": str(number % 10)},
            }
            if number % 2:
                frames = draw.integers(0, 256, (NUM_FRAMES, SIDE, SIDE, 3), np.uint8)
                sample["mp4"] = encode_video(path.with_suffix(".mp4"), "mp4v", frames, fps=4.0)
            else:
                sample |= {f"{place}.jpg": _jpeg(draw) for place in range(2)}
            shard.write(sample)
    path.with_suffix(".mp4").unlink()


def _jpeg(draw: np.random.Generator) -> bytes:
    image = io.BytesIO()
    Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(image, "JPEG")
    return image.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media")
    build_model_folder(path / "model", seed=0, text=TOKENIZER_TEXT)
    write_shard(path / "train-000000.tar", NUM_TRAIN, seed=0)
    write_shard(path / "eval-000000.tar", NUM_EVAL, seed=1)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> runs.Finished:
    overrides = (
        "model.dtype=bfloat16",
        "train.freeze=[tower]",
        "controllers.num=3",
        f"train.steps={NUM_STEPS}",
        f"train.prompts_per_step={NUM_PROMPTS}",
        "rollout.group_size=2",
        "sampling.replace_groups=false",
        "rollout.max_images_per_prompt=2",
        "rollout.max_videos_per_prompt=1",
        "rollout.max_model_len=512",
        "data.video.fps=4",
        "dataplane.memory=128MiB",
        "eval.every=3",
        "checkpoint.every=0",
        "placement.num_devices=1",
        "rollout.num_engines=1",
    )
    return runs.run(runs.arguments(folder, folder / "model", "media", *overrides))


def test_a_run_on_images_and_videos_in_bfloat16_trains_on_every_sample_and_leaves_nothing_behind(
    run: runs.Finished, folder: Path
) -> None:
    assert run.status == 0, run.output
    assert run.left_behind == []
    records = runs.metrics(folder, "media")
    for record in records[1:]:
        assert record["sampling/num_groups"] == NUM_PROMPTS
        assert record["train/grad_norm"] > 0
        assert record["rollout/logprob_diff_mean"] < 0.02, "what bfloat16 rounds, and no more"
    num_media = NUM_TRAIN * 3 // 2 + NUM_EVAL * 3 // 2
    assert records[-1]["dataplane/num_media"] == records[-1]["dataplane/num_processed"] == num_media
    assert records[-1]["dataplane/num_recomputed"] == 0


def test_the_frozen_tower_stays_as_it_is_and_the_rest_is_trained(run: runs.Finished, folder: Path) -> None:
    assert run.status == 0, run.output
    before, after = (_weights(path) for path in (folder / "model", folder / "runs" / "media" / "hf"))
    assert before.keys() == after.keys()
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {name for name in changed if "visual" in name} == {name for name in before if "visual.merger" in name}
    assert {name for name in before if "visual" not in name} <= changed


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: weight.bfloat16() for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()
    }


def test_kept_rollouts_show_images_and_strips_of_videos(run: runs.Finished, folder: Path) -> None:
    assert run.status == 0, run.output
    for step in range(NUM_STEPS + 1):
        for row in read_rows(table_path(folder / "runs" / "media", step)):
            kinds = [medium["kind"] for medium in row["media"]]
            assert kinds in (["image", "image"], ["video"])
            for medium in row["media"]:
                assert 0 < len(medium["thumbnail"]) <= 8192
                width, height = Image.open(io.BytesIO(medium["thumbnail"])).size
                assert width == height * (1 if medium["kind"] == "image" else NUM_FRAMES)


def test_no_controller_grows_while_the_pixels_pass(run: runs.Finished, folder: Path) -> None:
    assert run.status == 0, run.output
    first, *_, last = runs.metrics(folder, "media")
    passed = last["dataplane/processed_bytes"] - first["dataplane/processed_bytes"]
    assert passed > 48 * MIB
    assert last["controller/rss_bytes_max"] - first["controller/rss_bytes_max"] < 16 * MIB
