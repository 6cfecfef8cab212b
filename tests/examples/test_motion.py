"""Tests of a small version of the motion example: real MP4 that the data plane decodes, prompts of a run, and a warm-up
that learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.media.videos import Video
from examples.digits.model import build_model_folder
from examples.motion import warmup
from examples.motion.data import DIRECTIONS, NUM_FRAMES, QUESTION, Split, make_split, write_shards
from examples.motion.prepare import TOKENIZER_TEXT, main, read_stamp
from examples.preparing import STAMP_NAME, WarmupError
from models.recipes.media_recipes import load_recipes
from yatt_mm.config.run_config import load_config
from yatt_mm.generation.prompts import PromptSource
from yatt_mm.preflight.run_sets import find_held_out_sets, find_train_sets
from yatt_mm.protocol.control import RunStart, Slot

CONFIG = Path(__file__).parents[2] / "configs" / "motion_cpu.yaml"


@pytest.fixture(scope="module")
def split() -> Split:
    return make_split(seed=0, num_train=40, num_held_out=12)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("motion") / "model"
    build_model_folder(directory, seed=0, text=TOKENIZER_TEXT)
    return directory


def test_a_clip_shows_a_digit_that_goes_where_its_answer_says(split: Split) -> None:
    for clip in split.train:
        frames = np.stack(list(Video(clip.mp4).frames(range(NUM_FRAMES)))).mean(axis=-1)
        rows, columns = np.indices(frames.shape[1:])
        places = [[(frame * axis).sum() / frame.sum() for axis in (rows, columns)] for frame in (frames[0], frames[-1])]
        way = np.subtract(places[1], places[0])
        assert np.dot(way, DIRECTIONS[clip.answer]) > 12 and np.abs(way).min() < 3
    assert {clip.answer for clip in split.train} == set(DIRECTIONS)


def test_the_same_seed_gives_the_same_bytes(split: Split, tmp_path: Path) -> None:
    again = make_split(seed=0, num_train=40, num_held_out=12)
    first, second = (write_shards(tmp_path / name, part) for name, part in (("1", split), ("2", again)))
    assert [path.name for path in first] == [*(f"train-00000{shard}.tar" for shard in range(3)), "eval-000000.tar"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert not {clip.key for clip in split.train} & {clip.key for clip in split.held_out}


def test_a_run_gets_the_clips_as_patches_of_all_their_frames(split: Split, model_dir: Path, tmp_path: Path) -> None:
    write_shards(tmp_path, split)
    config = load_config(CONFIG, [f"model.path={model_dir}", "controllers.num=1"])
    roots = {name: [str(tmp_path / f"{name}-*.tar")] for name in ("train", "eval")}
    with EmbeddedNode(memory_bytes=32 * 2**20, roots=roots) as node, Client(node.uri) as client:
        (train,), (held_out,) = find_train_sets(client, config), find_held_out_sets(client, config)
        start = RunStart(step=0, checkpoint=None, train_sets=(train.run_set,), eval_sets=(held_out.run_set,))
        recipes = load_recipes(model_dir, config.data.video.sampling())
        prompts, notices = PromptSource(client, config, recipes, start, controller=0).load(
            [Slot(position=place, epoch=0, index=place) for place in range(train.run_set.num_samples)]
        )
    assert (len(prompts), notices, held_out.run_set.num_samples) == (40, [], 12)
    assert {prompt.question.text for prompt in prompts} == {QUESTION}
    for prompt in prompts:
        (ref,) = prompt.media
        assert ref.meta["medium"] == "video" and ref.meta["grid_thw"] == [NUM_FRAMES // 2, 4, 4]
        assert ref.meta["frame_indices"] == list(range(NUM_FRAMES))


def test_directions_are_single_tokens(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert all(len(tokenizer(direction)["input_ids"]) == 1 for direction in DIRECTIONS)


def test_the_warm_up_shows_each_clip_with_its_answer_as_a_run_samples_it(split: Split) -> None:
    samples = warmup._samples(split.train)
    assert [sample.answer for sample in samples] == [clip.answer for clip in split.train]
    for sample, clip in zip(samples, split.train, strict=True):
        (video,) = sample.media
        frames = [list(each.frames(range(NUM_FRAMES))) for each in (video, Video(clip.mp4))]
        assert np.array_equal(*frames)
    assert load_config(CONFIG, ["model.path=m"]).data.video.sampling() == warmup.SAMPLING


@pytest.mark.parity
def test_the_warm_up_learns_the_form_and_refuses_to_save_what_learned_too_little(
    split: Split, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (model_dir / "model.safetensors").read_bytes()
    monkeypatch.setattr(warmup, "MAX_STEPS", 10)
    monkeypatch.setattr(warmup, "NUM_FORM_STEPS", 9)
    monkeypatch.setattr(warmup, "ACCURACY_RANGE", (0.9, 1.0))
    with pytest.raises(WarmupError, match=r"after 10 warm-up steps; wanted 0\.9 to 1\.0"):
        warmup.warm_up(model_dir, split, target=1.0)
    assert (model_dir / "model.safetensors").read_bytes() == before
    monkeypatch.setattr(warmup, "ACCURACY_RANGE", (0.0, 1.0))
    made = warmup.warm_up(model_dir, split, target=1.0)
    assert made.num_steps == 10 and (model_dir / "model.safetensors").read_bytes() != before


def test_a_broken_stamp_is_not_taken_for_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / STAMP_NAME).write_text('{"seed": 0')
    assert read_stamp(tmp_path, seed=0) is None
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--force" in capsys.readouterr().out
