"""Tests of the judge example: its questions, a small version of its training, and that the run asks the same
questions."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from examples.digits import data
from examples.digits.data import Split, make_split
from examples.digits.model import TOKENIZER_TEXT, build_model_folder, load_processor
from examples.digits.prepare import VERSION as DIGITS_VERSION
from examples.judge import lessons, teaching
from examples.judge.muon import Muon
from examples.judge.prepare import VERSION, prepare, read_stamp
from examples.preparing import STAMP_NAME, WarmedUp
from yatt_mm.common.conversation import ask
from yatt_mm.config.run_config import load_config
from yatt_mm.rollout.engine_types import MediaTokens
from yatt_mm.rollout.prompt_template import MediumSize, PromptTemplate

ROOT = Path(__file__).parents[2]
PIECES = ["a", "7", " of", "12"]


@pytest.fixture(scope="module")
def small() -> Split:
    split = make_split(seed=0)
    return replace(split, train=split.train[:8], held_out=split.held_out[:8])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("judge") / "model"
    build_model_folder(directory, seed=0, text=TOKENIZER_TEXT + lessons.TOKENIZER_TEXT)
    return directory


def test_yes_and_no_are_single_tokens_of_the_judge_and_digits_stay_so(folder: Path) -> None:
    tokenizer = load_processor(folder).tokenizer
    for text in (lessons.YES, lessons.NO, *lessons.DIGITS):
        assert len(tokenizer(text)["input_ids"]) == 1


def test_half_of_the_answers_are_right_and_no_wrong_one_ever_is() -> None:
    rng = random.Random(0)
    digits = ["7", "3"] * 1000
    lesson = lessons.judging(digits, range(2000), PIECES, rng)
    assert lesson.answers == ("yes",) * 2000 + ("no",) * 2000
    assert lesson.scans == (*range(2000), *range(2000))
    assert set(lesson.questions[:2000]) == {"7?", "3?"}
    wrong = lesson.questions[2000:]
    assert all(question != f"{digit}?" for question, digit in zip(wrong, digits))
    assert {"0?", "77?", "?", "1212?"} <= set(wrong), "other digits, and what is no single digit"
    num_digits = sum(len(question) == 2 and question[0].isdigit() for question in wrong)
    assert 0.8 < num_digits / 2000 < 0.95


def test_the_judge_is_asked_in_the_run_what_it_was_taught(folder: Path) -> None:
    judge = load_config(ROOT / "configs" / "judge_full_cpu.yaml").reward.judges["digits"]
    assert judge.template == lessons.TEMPLATE
    assert (judge.yes_words, judge.no_words) == ((lessons.YES,), (lessons.NO,))
    pupil = teaching._Pupil(folder)
    tokenizer = load_processor(folder).tokenizer
    tokens = MediaTokens(image=pupil.model.config.image_token_id, video=None)
    asked = PromptTemplate(tokenizer, tokens).token_ids(ask("7?", ["image"]), [MediumSize(num_tokens=4)])
    assert tokenizer(pupil._prompt("7?", 4), add_special_tokens=False)["input_ids"] == asked


def test_questions_of_different_lengths_are_answered_as_each_alone(folder: Path, small: Split) -> None:
    pupil = teaching._Pupil(folder)
    scans = pupil.look_at(small.train)
    lesson = lessons.Lesson(scans=(0, 1, 2), questions=("7?", "?", "it is 7?"), answers=("yes", "no", "no"))
    with torch.no_grad():
        together = pupil._logits(scans, lesson)
        for place in range(3):
            alone = lessons.Lesson(
                scans=lesson.scans[place : place + 1],
                questions=lesson.questions[place : place + 1],
                answers=lesson.answers[place : place + 1],
            )
            torch.testing.assert_close(pupil._logits(scans, alone)[0], together[place], rtol=0, atol=1e-5)


@pytest.mark.parity
def test_a_judge_learns_the_scans_it_is_shown(folder: Path, small: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teaching, "NUM_READING_STEPS", 30)
    monkeypatch.setattr(teaching, "NUM_JUDGING_STEPS", 60)
    monkeypatch.setattr(teaching, "BATCH_SIZE", 8)
    monkeypatch.setattr(teaching, "MIN_ACCURACY", 0.8)
    seen: list[tuple[str, int]] = []
    shown = replace(small, held_out=small.train)
    taught = teaching.teach(folder, shown, on_step=lambda stage, num_steps, _: seen.append((stage, num_steps)))
    assert taught.reading_accuracy == 1.0
    assert taught.accuracy >= 0.8
    assert seen == [("reading", step) for step in range(1, 31)] + [("judging", step) for step in range(31, 91)]


@pytest.mark.parametrize("shape", [(48, 20), (20, 48)])
def test_muon_takes_the_steps_of_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    optimizers = (
        Muon([ours], lr=1e-2),
        torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - theirs).norm() < 0.02 * theirs.norm(), "torch computes in bfloat16"


def test_a_judge_that_is_wrong_too_often_is_refused_and_its_folder_stays(
    folder: Path, small: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(teaching, "NUM_READING_STEPS", 1)
    monkeypatch.setattr(teaching, "NUM_JUDGING_STEPS", 1)
    with pytest.raises(teaching.TeachingError, match=r"held-out answers after 1 steps; wanted 0\.97"):
        teaching.teach(folder, small)
    assert (folder / "model.safetensors").read_bytes() == before


def test_what_is_prepared_is_made_once(tmp_path: Path, small: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "make_split", lambda *, seed: small)
    monkeypatch.setattr(teaching, "NUM_READING_STEPS", 1)
    monkeypatch.setattr(teaching, "NUM_JUDGING_STEPS", 1)
    monkeypatch.setattr(teaching, "MIN_ACCURACY", 0.0)
    made = prepare(tmp_path / "judge", seed=0)
    assert (made.version, made.num_steps) == (VERSION, 2)
    assert read_stamp(tmp_path / "judge", seed=0) == made
    assert read_stamp(tmp_path / "judge", seed=1) is None
    AutoModelForImageTextToText.from_pretrained(tmp_path / "judge" / "model")
    digits = WarmedUp(version=DIGITS_VERSION, seed=0, num_train=8, num_held_out=8, num_warmup_steps=1, accuracy=0.5)
    (tmp_path / STAMP_NAME).write_text(json.dumps(asdict(digits)))
    script = (
        "import sys; from examples.judge.prepare import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'sklearn'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", script, "--out", str(tmp_path / "judge"), "--digits", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "already prepared" in " ".join(result.stdout.split())
    (tmp_path / "judge" / STAMP_NAME).write_text('{"seed": 0')
    assert read_stamp(tmp_path / "judge", seed=0) is None
