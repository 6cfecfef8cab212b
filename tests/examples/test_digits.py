"""Tests of the digits example: shards that other libraries can read, a folder that transformers loads, a warm-up whose
accuracy is in the wanted range."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from examples.digits import warmup
from examples.digits.data import IMAGE_SIDE, QUESTION, Split, make_split, write_shards
from examples.digits.model import build_model_folder, load_processor
from examples.digits.prepare import main, read_stamp
from examples.preparing import STAMP_NAME, WarmedUp, WarmupError
from tests.yatt_mm import runs
from yatt_mm.keeper.table import read_rows, table_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def split() -> Split:
    return make_split(seed=0)


def _read(paths: list[Path]) -> list[dict]:
    dataset = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False).decode("pil")
    return list(dataset)


def test_shards_open_with_webdataset_and_hold_a_scan_and_its_question(split: Split, tmp_path: Path) -> None:
    paths = write_shards(tmp_path, split)
    assert [path.name for path in paths] == [
        "train-000000.tar",
        "train-000001.tar",
        "train-000002.tar",
        "eval-000000.tar",
    ]
    samples = _read(paths)
    assert len(samples) == 1797
    assert all(sample["png"].size == (IMAGE_SIDE, IMAGE_SIDE) for sample in samples)
    assert {sample["json"]["question"] for sample in samples} == {QUESTION}
    assert {sample["json"]["answer"] for sample in samples} == set("0123456789")


def test_split_is_disjoint_and_complete(split: Split) -> None:
    train, held_out = ({sample.png for sample in part} for part in (split.train, split.held_out))
    assert (len(train), len(held_out)) == (1500, 297)
    assert not train & held_out


def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_split(split: Split, tmp_path: Path) -> None:
    first = [path.read_bytes() for path in write_shards(tmp_path / "first", split)]
    second = [path.read_bytes() for path in write_shards(tmp_path / "second", make_split(seed=0))]
    assert first == second
    assert make_split(seed=1).held_out != split.held_out


def test_the_model_folder_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("second", 0), ("other", 1)):
        build_model_folder(tmp_path / name, seed=seed)
    first, second, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "second", "other")
    )
    assert first == second
    assert [name for name in first if first[name] != other[name]] == ["model.safetensors"]


def test_the_folder_loads_with_transformers_and_answers_about_an_image(tiny_dir: Path, split: Split) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny_dir)
    assert model.dtype == torch.float32
    assert 500_000 < sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    processor = AutoProcessor.from_pretrained(tiny_dir)
    image = Image.open(io.BytesIO(split.train[0].png))
    content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == 4
    assert model.generate(**inputs, max_new_tokens=2, min_new_tokens=2).shape == (1, inputs["input_ids"].shape[1] + 2)


def test_the_tokenizer_gives_each_digit_one_token_and_keeps_any_text(tiny_dir: Path) -> None:
    tokenizer = AutoProcessor.from_pretrained(tiny_dir).tokenizer
    assert all(len(tokenizer(str(digit))["input_ids"]) == 1 for digit in range(10))
    assert len(tokenizer("2026")["input_ids"]) == 4
    text = "What's in thé picture? 数字 <|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_load_processor_resizes_with_pillow(tiny_dir: Path) -> None:
    processor = load_processor(tiny_dir).image_processor
    assert type(processor) is Qwen2VLImageProcessorPil
    pixels = np.random.default_rng(0).integers(0, 256, (70, 45, 3), dtype=np.uint8)
    raw = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    patches = processor([Image.fromarray(pixels)], **raw)
    grid_h, grid_w = patches["image_grid_thw"][0, 1:]
    resized = Image.fromarray(pixels).resize((14 * grid_w, 14 * grid_h), Image.Resampling.BICUBIC)
    again = processor([resized], **raw)
    np.testing.assert_array_equal(patches["pixel_values"], again["pixel_values"])


def test_every_backend_gives_the_same_patches_for_the_scans(tiny_dir: Path, split: Split) -> None:
    images = [Image.open(io.BytesIO(sample.png)) for sample in split.train[:8]]
    raw = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    default, pillow = (
        processor.image_processor(images, **raw)["pixel_values"]
        for processor in (AutoProcessor.from_pretrained(tiny_dir), load_processor(tiny_dir))
    )
    np.testing.assert_array_equal(default, pillow)


@pytest.mark.alone
def test_prepare_warms_the_model_up_to_the_wanted_range(prepared_digits: tuple[Path, WarmedUp], split: Split) -> None:
    directory, made = prepared_digits
    low, high = warmup.ACCURACY_RANGE
    assert low <= made.accuracy <= high
    model = AutoModelForImageTextToText.from_pretrained(directory / "model")
    processor = load_processor(directory / "model")
    batch = warmup._make_batch(processor, split.held_out)
    found = warmup.measure_accuracy(model, batch, processor.tokenizer.eos_token_id)
    assert found == pytest.approx(made.accuracy, abs=1.01 / made.num_held_out), "one answer may be a near tie"


@pytest.mark.alone
def test_a_second_prepare_changes_nothing_and_imports_nothing_heavy(prepared_digits: tuple[Path, WarmedUp]) -> None:
    directory, _ = prepared_digits
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    script = (
        "import sys; from examples.digits.prepare import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'sklearn'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, "--out", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "already prepared" in result.stdout.replace("\n", " ")
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


@pytest.mark.alone
def test_another_seed_or_a_broken_stamp_is_not_taken_for_prepared(
    prepared_digits: tuple[Path, WarmedUp], tmp_path: Path
) -> None:
    directory, made = prepared_digits
    assert read_stamp(directory, seed=0) == made
    assert read_stamp(directory, seed=1) is None
    (tmp_path / STAMP_NAME).write_text('{"seed": 0')
    assert read_stamp(tmp_path, seed=0) is None


@pytest.mark.parity
def test_evaluating_the_warmed_up_model_gives_the_accuracy_that_transformers_measured(
    prepared_digits: tuple[Path, WarmedUp], tmp_path: Path
) -> None:
    directory, made = prepared_digits
    exact = ("data.train=not/read", "reward.function=yatt_mm.rewards.functions:exact_match")
    where = (*runs.ONE_OF_EACH, f"run.dir={tmp_path}")
    done = runs.run(runs.arguments(directory, directory / "model", "one", *where, *exact), module="yatt_mm.evaluate")
    assert (done.status, done.left_behind) == (0, []), done.output
    (folder,) = (tmp_path / "one" / "evaluations").iterdir()
    (record,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert record["eval/accuracy"] == pytest.approx(made.accuracy, abs=1.5 / made.num_held_out)
    assert record["eval/num_samples"] == made.num_held_out
    assert f"{record['eval/accuracy']:.4f}" in done.output
    assert {row["split"] for row in read_rows(table_path(folder, 0))} == {"eval"}


def test_a_warm_up_that_misses_its_range_says_so_and_leaves_the_folder_alone(
    tiny_dir: Path, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (tiny_dir / "model.safetensors").read_bytes()
    monkeypatch.setattr(warmup, "MAX_STEPS", 2)
    small = replace(split, held_out=split.held_out[:8])
    with pytest.raises(WarmupError, match="after 2 warm-up steps"):
        warmup.warm_up(tiny_dir, small, seed=0)
    assert (tiny_dir / "model.safetensors").read_bytes() == before


def test_help_is_available(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--force" in capsys.readouterr().out
