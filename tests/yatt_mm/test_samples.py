"""Tests of the command that shows what a model said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.yatt_mm.keeper.rows import picture, row
from yatt_mm.keeper.table import table_path, write_rows
from yatt_mm.samples import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_rows(table_path(tmp_path, 0), [row(0, 0, split="eval", reward=1.0)])
    judged = [
        {"source": "reward.function", "score": 0.0, "words": None},
        {"source": "reward.judges.head", "score": 0.25, "words": "I doubt it"},
    ]
    rows = [row(5, place, reward=place / 10) for place in range(6)]
    rows += [row(6, 0, scores=judged, advantage=None, response="[bold]red[/]\x1b[31m\x07 end")]
    write_rows(table_path(tmp_path, 3), [*rows, row(0, 0, split="eval")])
    return tmp_path


def test_the_newest_step_is_shown_with_the_best_responses_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--responses", "3"]) == 0
    text = capsys.readouterr().out
    assert "step 3, train, sample 15" in text and "step 3, eval, sample 10" in text and "step 0" not in text
    places = [text.index(f"response 5/{place}") for place in (5, 4, 0)]
    assert places == sorted(places), "the two best, and the worst"
    assert "response 5/3" not in text and "3 more responses" in text
    assert "reward 0.500  advantage +0.000  2 tokens  stop  mean log-probability -0.250" in text
    assert "reward.judges.head 0.250 I doubt it" in text and "not trained on" in text


def test_a_long_response_is_shown_to_its_end_and_with_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(table_path(tmp_path, 1), [row(0, 0, response="word " * 100 + "last\nsecond line")])
    assert main([str(tmp_path)]) == 0
    assert "word last\n  second line\n" in capsys.readouterr().out


def test_what_a_model_says_cannot_control_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--split", "train"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\x07" not in text
    assert "[bold]red[/][31m end" in text


def test_a_step_and_a_split_can_be_chosen_and_pictures_are_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = tmp_path / "pictures"
    assert main([str(run), "--step", "0", "--split", "eval", "--pictures", str(pictures)]) == 0
    text = capsys.readouterr().out
    assert "step 0, eval" in text and "train" not in text
    (file,) = pictures.iterdir()
    assert file.read_bytes() == picture(0) and str(file) in text


def test_what_the_model_read_is_shown_with_its_media_and_one_set_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": content},
    ]
    said = [row(0, 0, conversation=json.dumps(turns), set="scans"), row(1, 0, set="clips"), row(2, 0, conversation="")]
    write_rows(table_path(tmp_path, 1), said)
    assert main([str(tmp_path), "--conversation", "--set", "scans"]) == 0
    text = capsys.readouterr().out
    assert "  system Be short.\n" in text and "  user <image>Which?\n" in text and "question" not in text
    assert "of scans" in text and "clips" not in text
    assert main([str(tmp_path), "--conversation"]) == 0
    assert capsys.readouterr().out.count("\n  question ") == 2, "earlier files have no turns"
    assert main([str(tmp_path), "--set", "none"]) == 2
    assert "has no rows of the set none; it has clips, scans, train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--step", "2"), "kept nothing of step 2; it has the steps 0, 3"),
        (("--step", "0", "--split", "train"), "has no rows of the split train"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    run: Path, options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), *options]) == 2
    assert reason in capsys.readouterr().err


def test_a_folder_without_rollouts_and_a_broken_file_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder; give the folder of a run" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "or it was started with rollouts.keep=none" in capsys.readouterr().err
    table_path(tmp_path, 1).parent.mkdir()
    table_path(tmp_path, 1).write_bytes(b"half")
    assert main([str(tmp_path)]) == 2
    assert "step_1.parquet is no file of rollouts" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_a_number_that_makes_no_sense_is_refused(run: Path, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(run), f"--prompts={number}"])
    assert f"found '{number}'; wanted a whole number of at least 1" in capsys.readouterr().err
