"""Tests of the command that shows what a run would find in its data sets, on a set of which every number is known."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from tests.dataplane.tables import write_lines
from tests.yatt_mm import runs
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import load_config
from yatt_mm.data import main
from yatt_mm.survey import survey as measures
from yatt_mm.survey.look import look
from yatt_mm.survey.survey import Survey, percentiles

SIZES = ((56, 56), (112, 56), (56, 112), (224, 224), (448, 224))
"""The width and height of the pictures of the samples, one each. The model takes at most 224 x 224 pixels."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("look")
    rows = []
    for number, size in enumerate(SIZES):
        Image.new("RGB", size).save(path / f"{number}.png")
        rows.append({"question": "What is it?", "answer": "7" * (number + 1), "image": f"{number}.png"})
    rows += [{"question": "And this?", "answer": "1", "image": f"gone{number}.png"} for number in range(2)]
    write_lines(path / "train-0.jsonl", rows)
    write_lines(path / "eval-0.jsonl", rows[:2])
    write_lines(path / "gone.jsonl", rows[5:])
    return path


def shown(folder: Path, model: Path, *overrides: str, num_samples: int | None = None) -> tuple[list[Survey], str]:
    """Return what is seen of the sets, and the text of it."""
    config, *rest = runs.arguments(folder, model, "look", "train.steps=1")
    sets = (f"data.train={folder}/train-*.jsonl", f"data.eval={folder}/eval-*.jsonl")
    out = io.StringIO()
    loaded = load_config(runs.ROOT / config, [*rest, *sets, *overrides])
    seen = look(loaded, num_samples=num_samples, num_first=1, console=Console(file=out, width=200))
    return seen, out.getvalue()


def command(folder: Path, model: Path, *more: str) -> list[str]:
    config, *rest = runs.arguments(folder, model, "look", "train.steps=1")
    sets = (f"data.train={folder}/train-*.jsonl", f"data.eval={folder}/eval-*.jsonl")
    return [str(runs.ROOT / config), *rest, *sets, *more]


def values(seen: Survey, name: str) -> Sequence[float]:
    return sorted(seen.measures[name])


def test_every_number_is_that_of_the_samples(folder: Path, tiny_dir: Path) -> None:
    (train, held_out), text = shown(folder, tiny_dir)
    assert (train.num_usable, train.num_unusable, train.num_filtered) == (5, 2, 0)
    assert values(train, measures.WIDTH) == sorted(float(width) for width, _ in SIZES)
    assert values(train, measures.HEIGHT) == sorted(float(height) for _, height in SIZES)
    # 14 x 14 pixels a patch, 4 patches a token; 448 x 224 becomes 308 x 140 by the processor's rule
    assert values(train, measures.PATCHES) == [16, 32, 32, 220, 256]
    assert values(train, measures.MEDIA_TOKENS) == [4, 8, 8, 55, 64]
    around = {
        tokens - media
        for tokens, media in zip(train.measures[measures.PROMPT_TOKENS], train.measures[measures.MEDIA_TOKENS])
    }
    assert len(around) == 1, "the same question in the same template"
    assert values(train, measures.ANSWER_CHARS) == [1, 2, 3, 4, 5]
    assert (held_out.num_usable, held_out.num_seen) == (2, 2)
    assert "looked at all: 5 usable, 2 cannot be used" in text
    ((reason, count),) = train.reasons.ranked()
    assert count == 2 and "gone" in reason
    assert "line 6 in train-0.jsonl" in text or "line 7 in train-0.jsonl" in text
    assert "user <image>What is it?" in text


def test_a_filter_is_seen_before_a_run_uses_it(folder: Path, tiny_dir: Path) -> None:
    (train, held_out), text = shown(folder, tiny_dir, "data.filter.max_pixels=50176", "data.filter.min_pixels=4000")
    assert (train.num_usable, train.num_filtered, train.num_unusable) == (3, 2, 2)
    assert held_out.num_filtered == 0 and held_out.num_usable == 2
    assert "3 usable, 2 left out by data.filter, 2 cannot be used" in text
    (train, _), _ = shown(folder, tiny_dir, "data.filter.max_prompt_tokens=40")
    assert max(train.measures[measures.PROMPT_TOKENS]) <= 40 and train.num_filtered == 2


def test_what_is_not_seen_whole_is_drawn_at_random_and_alike_with_the_same_seed(folder: Path, tiny_dir: Path) -> None:
    (train, _), text = shown(folder, tiny_dir, num_samples=3)
    again, _ = shown(folder, tiny_dir, num_samples=3)
    assert train.num_seen == 3 and "looked at 3 at random" in text
    assert train.measures == again[0].measures
    drawn = [shown(folder, tiny_dir, f"run.seed={seed}", num_samples=3)[0][0] for seed in range(4)]
    assert len({tuple(values(one, measures.WIDTH)) for one in drawn}) > 1, "another seed draws others"


def test_sets_of_a_mixture_have_their_shares(folder: Path, tiny_dir: Path) -> None:
    path = f"{folder}/train-0.jsonl"
    sets = f"data.train=[{{name: a, path: '{path}', weight: 3}}, {{name: b, path: '{path}', weight: 1}}]"
    _, text = shown(folder, tiny_dir, sets)
    assert "data.train[a], 75.0% of the prompts" in text and "data.train[b], 25.0% of the prompts" in text


def test_what_a_run_would_refuse_is_shown_and_then_refused(
    folder: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, tiny_dir, f"data.train={folder}/gone.jsonl")) == 2
    done = capsys.readouterr()
    assert "looked at all: 0 usable, 2 cannot be used" in done.out
    assert "error: a run would not start: data.train: none of the first 2 samples can be used" in done.err
    assert "data.eval" not in done.err
    assert main(command(folder, tiny_dir, "data.on_bad_media=fail")) == 2
    assert "data.train has samples that cannot be used, and data.on_bad_media is fail" in capsys.readouterr().err


def test_what_a_run_says_before_it_starts_is_said_here_too(
    folder: Path, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, tiny_dir, "reward.function=no_such_file.py:score")) == 2
    assert "reward.function is 'no_such_file.py:score': there is no file" in capsys.readouterr().err
    odd = f"data.train=[{{name: odd, path: {folder}/eval-0.jsonl, reward: 'json:nothing'}}]"
    assert main(command(folder, tiny_dir, odd)) == 2
    assert "data.train[odd].reward is 'json:nothing': json has no function nothing" in capsys.readouterr().err
    assert main(command(folder, tiny_dir, f"data.train={folder}/eval-0.jsonl")) == 0
    assert "data.train and data.eval have 1 file(s) in common" in capsys.readouterr().out
    assert main(command(folder, tiny_dir, "data.filter.min_pixels=1000000")) == 2
    assert (
        "a run would not start: data.train: of 7 samples at random data.filter leaves out 5" in capsys.readouterr().err
    )


def test_samples_without_media_count_as_none(folder: Path, tiny_dir: Path, tmp_path: Path) -> None:
    row = {"question": "What is it?", "answer": "7"}
    write_lines(folder / "some.jsonl", [row | {"images": names} for names in (["0.png"], [], [])])
    (train, _), text = shown(folder, tiny_dir, f"data.train={folder}/some.jsonl")
    assert values(train, measures.IMAGES) == [0, 0, 1] and values(train, measures.MEDIA_TOKENS) == [0, 0, 4]
    assert measures.IMAGES in train.measured and measures.VIDEOS not in train.measured
    assert "images of a sample" in text and "videos of a sample" not in text


def test_a_set_that_cannot_be_read_hides_no_other(
    folder: Path, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "strange.jsonl", [{"a": 1, "b": 2}])
    sets = f"[{{name: odd, path: {tmp_path}/strange.jsonl}}, {{name: good, path: '{folder}/train-0.jsonl'}}]"
    assert main(command(folder, tiny_dir, f"data.train={sets}")) == 2
    done = capsys.readouterr()
    assert "data.train[good]" in done.out and "5 usable, 2 cannot be used" in done.out and "data.eval" in done.out
    assert "error: a run would not start: data.train[odd], first sample" in done.err
    picture = tmp_path / "picture.png"
    strange = f"{tmp_path}/strange.jsonl"
    nothing = (f"data.train={strange}", f"data.eval={strange}", "--histograms", str(picture))
    assert main(command(folder, tiny_dir, *nothing)) == 2
    said = capsys.readouterr()
    assert "data.train, first sample" in said.err and "data.eval, first sample" in said.err
    assert not picture.exists() and "histograms" not in said.out


def test_held_out_sets_are_neither_filtered_nor_refused_for_it_and_keep_their_answers(
    folder: Path, tiny_dir: Path
) -> None:
    overrides = ("data.filter.min_pixels=6000", "data.shuffle_answers=true")
    (train, held_out), _ = shown(folder, tiny_dir, *overrides)
    assert train.num_filtered > 0
    assert held_out.num_usable == 2 and values(held_out, measures.ANSWER_CHARS) == [1, 2]


@pytest.mark.parametrize("name", ["picture.jpgg", "no/such/picture.png"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_looked_at(
    folder: Path, tiny_dir: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, tiny_dir, "--histograms", str(tmp_path / name))) == 2
    done = capsys.readouterr()
    assert "--histograms is" in done.err and "looked at" not in done.out


def test_the_model_needs_no_weights_and_the_histograms_are_a_picture(
    folder: Path, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_dir.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    picture = tmp_path / "picture.png"
    assert main(command(folder, model, "--samples", "all", "--first", "0", "--histograms", str(picture))) == 0
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width > image.height
    assert "sample " not in capsys.readouterr().out.replace("of a sample ", "")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.filter={min_pixels: 10, max_pixels: 9}", "min_pixels is 10, above max_pixels"),
        ("data.filter.max_tokens=9", "max_tokens"),
    ],
)
def test_a_filter_that_cannot_be_meant_is_refused(
    folder: Path, tiny_dir: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert main(command(folder, tiny_dir, override)) == 2
    assert message in capsys.readouterr().err


def test_a_filter_by_tokens_needs_a_tokenizer_that_controllers_can_read(
    folder: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    for file in tiny_dir.iterdir():
        (tmp_path / ("vocab.json" if file.name == "tokenizer.json" else file.name)).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"data.filter.max_prompt_tokens counts tokens .* needs tokenizer.json"):
        shown(folder, tmp_path, "data.filter.max_prompt_tokens=40")


def test_percentiles_are_those_of_the_values() -> None:
    assert percentiles([*range(1, 101)]) == (50.5, 1.0, 50.5, 95.05, 100.0)
