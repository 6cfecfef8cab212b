"""Tests of `reward.judges.<name>.verdict=classifier`: what the model's folder must hold, and which keys apply."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from models.recipes.media_recipes import VideoSampling
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.judge_section import JudgeSection, judge_spec, num_labels
from yatt_mm.protocol.genrm import JudgeSpec
from yatt_mm.protocol.verdicts import LabelScore


def make_folder(directory: Path, *, num_rows: int, head: str = "score.weight", config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    tensors = {"model.norm.weight": np.ones(4, np.float32), head: np.ones((num_rows, 4), np.float32)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def spec_of(folder: Path, **keys: Any) -> JudgeSpec:
    return judge_spec("head", JudgeSection(model=str(folder), verdict="classifier", **keys), VideoSampling())


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "one", num_rows=1, config={"num_labels": 1})


@pytest.fixture
def three(tmp_path: Path) -> Path:
    labels = {"0": "harmless", "1": "helpful", "2": "right"}
    return make_folder(tmp_path / "three", num_rows=3, config={"id2label": labels})


def test_a_single_label_is_the_score_as_it_is(one: Path) -> None:
    spec = spec_of(one, threshold=-2.5, score_on_failure=-10)
    assert spec.verdict == LabelScore(label=0, activation="none")
    assert spec.template.text == "{question}" and not spec.template.names_response
    assert (spec.num_sampled, spec.is_repeatable) == (0, True)
    assert [spec.score_of(votes) for votes in ([-3.0], [-2.0], [])] == [0.0, 1.0, -10.0]
    assert num_labels(JudgeSection(model=str(one), verdict="classifier")) == 1
    assert num_labels(JudgeSection(model=str(one))) is None


@pytest.mark.parametrize("label", ["right", 2])
def test_one_of_several_labels_is_named_or_counted(label: str | int, three: Path) -> None:
    assert spec_of(three, label=label, activation="softmax").verdict == LabelScore(label=2, activation="softmax")


@pytest.mark.parametrize("label", [None, "wrong", 3, -1])
def test_a_label_that_there_is_not_is_refused_with_those_that_there_are(label: str | int | None, three: Path) -> None:
    found = "not set" if label is None else re.escape(repr(label))
    with pytest.raises(ConfigError, match=rf"judges\.head: label is {found}; .* are harmless, helpful, right"):
        spec_of(three, label=label)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pattern": "(x)"}, "pattern is '(x)', but verdict classifier has no use for it"),
        ({"max_tokens": 1}, "max_tokens is 1, but"),
        ({"temperature": 1.0, "num_votes": 2}, "temperature is 1.0, but"),
        ({"num_votes": 2}, "num_votes is 2, but"),
        ({"scale": 2.0}, "scale is 2.0, but"),
        ({"yes_words": ("ja",)}, "yes_words is ('ja',), but"),
        ({"url": "http://host:8000/v1"}, "url is 'http://host:8000/v1', but"),
        ({"activation": "softmax"}, "activation is softmax, which is always 1"),
        ({"activation": "sigmoid", "threshold": 2.0}, "threshold is 2, but scores of this judge are between 0 and 1"),
        ({"activation": "sigmoid", "score_on_failure": -1}, "score_on_failure is -1, but"),
        ({"template": "{reply}"}, "the template names {reply}"),
    ],
)
def test_keys_that_mean_nothing_to_a_classifier_are_refused(keys: dict[str, Any], message: str, one: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"reward.judges.head: {message}")):
        spec_of(one, **keys)


@pytest.mark.parametrize("keys", [{"label": 0}, {"activation": "sigmoid"}, {"threshold": 1.5}])
def test_a_judge_that_speaks_has_no_labels_and_no_logits(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.judges\.says: {next(iter(keys))} is"):
        judge_spec("says", JudgeSection(model="m", **keys), VideoSampling())


def test_a_folder_without_the_head_is_refused_with_what_it_has(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_rows=1, head="v_head.summary.weight", config={})
    with pytest.raises(ConfigError, match=r"no tensor score\.weight.*beside the model it has v_head\.summary\.weight"):
        spec_of(folder)


def test_a_head_and_a_config_that_disagree_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_rows=3, config={"num_labels": 1})
    with pytest.raises(ConfigError, match=r"a head of 3 rows \(score\.weight\) and 1 labels in its config\.json"):
        spec_of(folder)
