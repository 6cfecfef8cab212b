"""Tests that what is wrong with all samples of a set is reported before anything heavy starts."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from models.recipes.media_recipes import VideoSampling, load_recipes
from tests.dataplane.tables import write_lines
from tests.yatt_mm import runs
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.preflight import reward_trial
from yatt_mm.preflight.first_samples import check_first_samples
from yatt_mm.preflight.run_sets import FoundSet, find_held_out_sets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("first")
    runs.write_shard(path / "train.tar", range(2))
    runs.write_shard(path / "torn.tar", range(110), corrupt=tuple(range(110)))
    runs.write_shard(path / "late.tar", range(20), corrupt=tuple(range(17)))
    runs.write_shard(path / "five.tar", range(5), corrupt=(0, 2))
    image = io.BytesIO()
    Image.new("RGB", (56, 56)).save(image, "PNG")
    (path / "scan.png").write_bytes(image.getvalue())
    row = {"question": "What is it?", "answer": "7", "image_path": "scan.png"}
    write_lines(path / "paths.jsonl", [row, row])
    write_lines(path / "quiet.jsonl", [row, row | {"question": ""}])
    write_lines(path / "mute.jsonl", [row, row | {"answer": ""}])
    write_lines(path / "gone.jsonl", [row | {"image_path": f"gone{number}.png"} for number in range(3)])
    with tarfile.open(path / "train.tar") as whole, tarfile.open(path / "apart.tar", "w") as apart:
        for member in sorted(whole.getmembers(), key=lambda member: member.name.rpartition(".")[2], reverse=True):
            apart.addfile(member, whole.extractfile(member))
    write_lines(path / "marked.jsonl", [row | {"question": "What is <image>?"}] * 2)
    write_lines(path / "texts.jsonl", [{"question": "What is 3 + 4?", "answer": "7"}])
    return path


SETS = (
    "quiet.jsonl#media=image_path",
    "mute.jsonl#media=image_path",
    "gone.jsonl#media=image_path",
    "apart.tar",
    "train.tar",
    "torn.tar",
    "late.tar",
    "five.tar",
    "paths.jsonl",
    "marked.jsonl",
    "texts.jsonl",
    "paths.jsonl#media=image_path",
)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    roots = {name.replace("#media=", "."): [str(folder / name)] for name in SETS}
    with EmbeddedNode(memory_bytes=16 * 2**20, roots=roots) as node, Client(node.uri) as client:
        yield client


def check(client: Client, model: Path, *overrides: str, key: str = "data.train", name: str = "train.tar") -> str:
    """Return in words what the first samples of a set are like."""
    config = config_of(model, *overrides)
    recipes = load_recipes(model, VideoSampling())
    return check_first_samples(client, config, recipes, found(client, config, name, key=key)).words


def config_of(model: Path, *overrides: str) -> Config:
    config, *rest = runs.arguments(Path("unused"), model, "first", "train.steps=1", *overrides)
    return load_config(runs.ROOT / config, rest)


def found(client: Client, config: Config, name: str, *, key: str = "data.train") -> FoundSet:
    """Return what a run of this config finds under a name of the node."""
    at_the_node = config.model_copy(
        update={
            "dataplane": config.dataplane.model_copy(update={"uri": client.uri}),
            "data": config.data.model_copy(update={"eval": name}),
        }
    )
    (held_out,) = find_held_out_sets(client, at_the_node)
    is_train = key == "data.train"
    run_set = replace(held_out.run_set, name="train" if is_train else "eval")
    return replace(held_out, key=key, pattern=config.data.train[0].path, run_set=run_set)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.question_field=prompt", "set data.question_field"),
        ("data.answer_field=answer.truth", "set data.answer_field"),
        (
            "reward.judges.own.template='{response} or {fields[solution]}?'",
            r"the template wants fields\[solution\]; the sample has .*change reward\.judges\.own\.template",
        ),
    ],
)
def test_the_key_that_names_no_field_is_told(client: Client, tiny_dir: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"data.train, first sample .*{message}"):
        check(client, tiny_dir, "reward.judges.own.model=judge", override)


def test_what_is_there_passes_and_judges_see_no_held_out_sample(client: Client, tiny_dir: Path) -> None:
    judge = "reward.judges.own.model=judge"
    check(client, tiny_dir, judge, "reward.judges.own.template='{response} or {fields[answer]}?'")
    check(client, tiny_dir, judge, "reward.judges.own.template='{response} or {fields[solution]}?'", key="data.eval")


def test_a_set_of_which_the_first_hundred_are_bad_is_refused_with_the_reason(client: Client, tiny_dir: Path) -> None:
    message = (
        r"data.eval: none of the first 100 samples can be used(, \d+ of them)? because: .*first is 0000.. in torn.tar"
    )
    with pytest.raises(ConfigError, match=message):
        check(client, tiny_dir, key="data.eval", name="torn.tar")


def test_one_good_sample_among_the_first_hundred_is_enough(client: Client, tiny_dir: Path) -> None:
    late, five = check(client, tiny_dir, name="late.tar"), check(client, tiny_dir, name="five.tar")
    assert late.startswith("1 image each; of the first 20 samples 17 cannot be used because: truncated or corrupt PNG")
    assert five.startswith("1 image each; of the first 5 samples 2 cannot be used because: ")
    assert check(client, tiny_dir) == "1 image each"


def test_questions_without_text_are_told(client: Client, tiny_dir: Path) -> None:
    told = check(client, tiny_dir, name="quiet.jsonl.image_path")
    assert told == "1 image each; without text in the question: 1 of the first 2 usable samples"


def test_empty_answers_and_a_reason_with_many_names_are_counted(client: Client, tiny_dir: Path) -> None:
    assert "with an empty answer: 1 of the first 2 usable samples" in check(
        client, tiny_dir, name="mute.jsonl.image_path"
    )
    with pytest.raises(
        ConfigError, match=r"none of the first 3 samples can be used because: 'gone0.png' cannot be read"
    ):
        check(client, tiny_dir, name="gone.jsonl.image_path")


def test_a_tar_whose_members_are_apart_is_told(client: Client, tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no members with fields .*The members of a sample must stand one after"):
        check(client, tiny_dir, name="apart.tar")


def test_the_limits_of_a_prompt_are_those_of_the_run(client: Client, tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"none of the first 2 samples .* because: its media make 4 tokens"):
        check(client, tiny_dir, "rollout.max_model_len=6")


def test_paths_of_images_that_are_not_read_are_told_with_the_remedy(client: Client, tiny_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check(client, tiny_dir, "data.train=paths.jsonl", name="paths.jsonl")
    assert str(caught.value) == (
        "data.train: the samples have no media, but image_path holds paths of images ('scan.png'). Name it with "
        "data.train='paths.jsonl#media=image_path' (in a tar, put each file beside its .json instead), or leave the "
        "column out with #drop=image_path"
    )
    assert check(client, tiny_dir, name="paths.jsonl.image_path") == "1 image each"
    assert check(client, tiny_dir, name="texts.jsonl") == "no media"


def test_a_chat_template_that_writes_no_placeholder_is_told_with_the_key(
    client: Client, tiny_dir: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_dir, tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{{ messages[0].content[1].text }}")
    with pytest.raises(
        ConfigError,
        match=r"none of the first 2 samples can be used because: the chat template wrote placeholders for no media",
    ):
        check(client, model)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("return float(response == answer)", []),
        (
            "return len(fields['level'])",
            [r"KeyError: 'level' \(.*mine.py:2\); the sample's fields are answer, question"],
        ),
        ("return 'good'", [r"it returned 'good', a str; wanted a finite number"]),
        ("import time; time.sleep(30)", []),
    ],
)
def test_a_reward_function_that_fails_on_a_right_answer_is_told_and_a_slow_one_is_not_waited_for(
    client: Client,
    tiny_dir: Path,
    tmp_path: Path,
    line: str,
    wanted: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward_trial, "LONGEST_S", 0.2)
    (tmp_path / "mine.py").write_text(f"def score(response, answer, fields):\n    {line}\n")
    reward = f"reward.function={tmp_path / 'mine.py'}:score"
    config = config_of(tiny_dir, reward)
    first = check_first_samples(
        client, config, load_recipes(tiny_dir, VideoSampling()), found(client, config, "train.tar")
    )
    told = list(reward_trial.try_rewards(client, config, {"data.train": first.prompt}))
    assert len(told) == len(wanted)
    for warning, message in zip(told, wanted):
        assert re.search(f"fails on the first sample of data.train, with its own answer .*{message}", warning)


@pytest.mark.parametrize(
    ("weights", "returned", "wanted"),
    [
        ("{colur: 1}", "{'colour': 1, 'form': 0}", "names colur, and .* they returned colour, form"),
        ("{colour: 1}", "1.0", "names colour, and .* they returned no parts"),
        ("{colour: 1}", "{'colour': 1}", None),
        ("{colour: 1}", "no_such_name", "fails on the first sample"),
        ("{} reward.part_ranges={colur: [0, 1]}", "{'colour': 1}", "reward.part_ranges names colur, and .* colour"),
        ("{} reward.part_ranges={score: [0, 1]}", "{'score': 1}", None),
    ],
)
def test_a_weight_of_a_part_that_no_function_returns_is_told(
    client: Client, tiny_dir: Path, tmp_path: Path, weights: str, returned: str, wanted: str | None
) -> None:
    (tmp_path / "mine.py").write_text(f"def score(response, answer, fields):\n    return {returned}\n")
    overrides = f"reward.part_weights={weights}".replace(" reward.", "\nreward.").splitlines()
    config = config_of(tiny_dir, f"reward.function={tmp_path / 'mine.py'}:score", *overrides)
    recipes = load_recipes(tiny_dir, VideoSampling())
    first = check_first_samples(client, config, recipes, found(client, config, "train.tar"))
    told = list(reward_trial.try_rewards(client, config, {"data.train": first.prompt}))
    assert len(told) == (wanted is not None)
    assert all(re.search(str(wanted), line) for line in told)


@pytest.mark.parametrize(
    ("key", "name", "refuses"),
    [("data.train", "train.tar", True), ("data.eval", "train.tar", False), ("data.train", "late.tar", True)],
)
def test_a_filter_that_leaves_nothing_is_refused(
    client: Client, tiny_dir: Path, key: str, name: str, refuses: bool
) -> None:
    assert "image each" in check(client, tiny_dir, "data.filter.max_prompt_tokens=20", key=key, name=name)
    if not refuses:
        assert "image each" in check(client, tiny_dir, "data.filter.max_prompt_tokens=19", key=key, name=name)
        return
    with pytest.raises(ConfigError, match=r"data\.filter leaves out .* because: .*; widen data\.filter"):
        check(client, tiny_dir, "data.filter.max_prompt_tokens=19", key=key, name=name)


def test_a_column_of_paths_is_named_also_where_the_question_has_placeholders(client: Client, tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"the samples have no media, but image_path holds paths of images"):
        check(client, tiny_dir, name="marked.jsonl")
