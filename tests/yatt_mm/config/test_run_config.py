"""Tests that a config is read and overridden, and that a wrong config is refused with a message that says what to
change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from yatt_mm.algorithms.table import ALGORITHMS, default_of
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.reference_page import reference, reference_page
from yatt_mm.config.run_config import Config, dump_config, load_config
from yatt_mm.config.values import parse_size

CONFIGS = Path(__file__).parents[3] / "configs"

MINIMAL = """
run: {name: test}
model: {path: model}
data: {train: "train-*.tar", eval: "eval-*.tar"}
train: {steps: 2, prompts_per_step: 4, lr: 1e-4}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def test_overrides_go_through_the_same_checks(config_file: Path) -> None:
    config = load_config(config_file, ["train.lr=5e-3", "train.parallel.tp=2", "dataplane.memory=64MiB"])
    assert config.train.lr == 5e-3
    assert config.train.parallel.tp == 2
    assert config.dataplane.memory == 64 * 2**20


def test_the_dumped_config_is_the_config(config_file: Path, tmp_path: Path) -> None:
    config = load_config(config_file, ["rollout.deterministic=true"])
    (tmp_path / "dumped.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dumped.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=1", "train.learning_rate is not a known key; did you mean train"),
        ("rollout.grup_size=4", "rollout.grup_size is not a known key; did you mean rollout.group_size"),
        ("parallel.tp=2", "did you mean train.parallel"),
        ("train.steps=many", "train.steps is 'many': wanted a whole number"),
        ("train.steps=1.5", "train.steps is 1.5: wanted a whole number"),
        ("train.steps=0", "train.steps is 0: wanted at least 1"),
        ("dataplane.memory=256", "dataplane.memory is 256: wanted at least 1048576"),
        ("train.lr=fast", "train.lr is 'fast': wanted a number"),
        ("train.lr=.inf", "train.lr is inf: wanted a finite number"),
        ("rollout.temperature=0", "rollout.temperature is 0: wanted more than 0"),
        ("rollout.temperature=3", "rollout.temperature is 3: wanted at most 2"),
        ("run.seed=99999999999", "run.seed is 99999999999: wanted less than 2147483648"),
        ("rollout.deterministic=maybe", "rollout.deterministic is 'maybe': wanted true or false"),
        ("run.name=7", "run.name is 7: wanted a text; put quotes around it, such as '\"7\"' on the command line"),
        ("model.dtype=fp16", "model.dtype is 'fp16': wanted 'float32' or 'bfloat16'"),
        ("train.freeze=tower", "train.freeze is 'tower': wanted a list, such as [a, b]"),
        ("train.freeze=[tower,merger,language]", "wanted at most 2 entries, not 3"),
        ("train.betas=0.9", "train.betas is 0.9: wanted a list, such as [a, b]"),
        ("train.parallel=3", "train.parallel is 3: wanted a section with keys of its own"),
        ("reward.judges=3", "reward.judges is 3: wanted a section with keys of its own"),
        ("reward.judges.A.model=x", "reward.judges.A is 'A': wanted a name of small letters, digits and '_'"),
        ("dataplane.memory=2XiB", "wanted a size such as 512MiB"),
        ("train.lr=2020-13-45", "train.lr: '2020-13-45' is not a YAML value"),
        ("reward.function={a} b", "Put quotes around a text with braces"),
        ("nonsense", "wanted dotted.key=value"),
        ("train.lr.x=1", "lr is a value, not a section"),
        ("run.name=a/b", "run.name is 'a/b': wanted a name of letters without accents, digits"),
    ],
)
def test_a_wrong_value_is_named_with_the_way_out(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, [override])
    assert message in str(caught.value)


def test_a_key_that_stands_twice_is_told_with_its_line(config_file: Path) -> None:
    text = config_file.read_text()
    config_file.write_text(f"{text}\ntrain:\n  steps: 3\n")
    line = len(text.splitlines()) + 2
    with pytest.raises(ConfigError, match=rf"train stands there twice; write it once\n.* line {line}"):
        load_config(config_file)


def test_every_problem_is_told_at_once(config_file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config_file, ["train.steps=0", "reward.num_workers=0"])
    assert "train.steps" in str(caught.value) and "reward.num_workers" in str(caught.value)


SETS = "eval.sets={c: {path: x, num_samples: 4, temperature: 1.0, metrics: [pass@4, maj@2]}}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.top_p=0.9", r"rollout.top_p cannot be set: tokens would .* takes it, as eval.sets.<name>.top_p"),
        ("eval.sets={a: {path: x, metrics: [best@4]}}", r"best@4 is no metric; wanted mean@k, pass@k or maj@k"),
        ("eval.sets={a: {path: x, metrics: [pass@4]}}", r"pass@4 needs num_samples of at least its k; it is 1"),
        ("eval.sets={a: {path: x, num_samples: 4}}", r"num_samples is 4 and temperature 0, which gives the same"),
        ("eval.keep_best=eval/a/pass@4", r"keep_best is eval/a/pass@4; wanted one of eval/accuracy$"),
        (
            "eval.sets={train: {path: x}}",
            r"data.train and eval.sets both have a set called train; give",
        ),
        ("eval.sets={eval: {path: x}}", r"a set is called eval, as that of data.eval is"),
        ("eval.sets={a: {temperature: 1}}", r"eval.sets.a.path is missing"),
        ("data.train=[{name: a, path: x}, {name: a, path: y}]", r"two sets are called a; give each a name of its own"),
        ("data.train=[{path: x}]", r"data.train.0.name is missing; add it to the config$"),
        ("data.train=[{name: a, path: x, weight: 0}]", r"data.train.0.weight is 0: wanted more than 0"),
        ("data.train=[]", r"data.train is \[\]: wanted at least 1 entries, not 0"),
        ("data.train=3", r"data.train is 3: wanted a list"),
    ],
)
def test_sets_that_cannot_be_meant_are_refused(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config_file, [override])


def test_sets_come_back_as_they_were_given(config_file: Path, tmp_path: Path) -> None:
    train = "data.train=[{name: a, path: x, weight: 2}, {name: b, path: y, fields: {media: [scan]}}]"
    for overrides in ([train, SETS, "data.eval=null"], []):
        config = load_config(config_file, overrides)
        (tmp_path / "config.yaml").write_text(dump_config(config))
        assert load_config(tmp_path / "config.yaml") == config
    assert yaml.safe_load(dump_config(config))["data"]["train"] == config.data.train[0].path, "one set is its path"


def test_a_config_is_laid_over_the_one_that_it_extends(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "over.yaml").write_text(
        "extends: ../run.yaml\nrun: {name: over}\ntrain: {steps: 7}\nmodel:\ndata: {train: [{name: a, path: b}]}\n"
    )
    over = load_config(tmp_path / "more" / "over.yaml", ["train.lr=1e-5"])
    base = load_config(config_file)
    assert (over.run.name, over.train.steps, over.train.lr) == ("over", 7, 1e-5)
    assert (over.model, over.data.eval) == (base.model, base.data.eval)
    assert over.train.prompts_per_step == base.train.prompts_per_step
    assert [one.name for one in over.data.train] == ["a"], "a list takes the place of the value below"
    (tmp_path / "third.yaml").write_text("extends: more/over.yaml\ntrain: {steps: 9}\n")
    assert load_config(tmp_path / "third.yaml").run.name == "over"


def test_a_config_that_extends_nothing_or_itself_is_refused(tmp_path: Path) -> None:
    for text, message in {
        "extends: none.yaml": r"self.yaml: extends is none.yaml, and there is no file .*none.yaml",
        "extends: [a, b]": r"extends is \['a', 'b'\]; wanted the path of a config",
        "extends: self.yaml": r"self.yaml extends itself, by way of .*self.yaml",
    }.items():
        (tmp_path / "self.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path / "self.yaml")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_config_over_that_of_the_digits(name: str) -> None:
    config, digits = load_config(CONFIGS / "algorithms" / f"{name}.yaml"), load_config(CONFIGS / "digits_cpu.yaml")
    assert (config.algorithm.name, config.run.name) == (name, f"digits_{name}")
    assert (config.model, config.data, config.train) == (digits.model, digits.data, digits.train)
    own = 0.28 if name == "gspo" else default_of(name, "clip_high")
    assert config.algorithm.clip_high == own
    assert load_config(CONFIGS / "digits_cpu.yaml", [f"algorithm.name={name}"]).algorithm.name == name


def test_a_missing_file_and_a_missing_key_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        load_config(tmp_path / "no.yaml")
    (tmp_path / "part.yaml").write_text("run: {name: x}")
    with pytest.raises(ConfigError, match=r"model.path is missing; .*\n?data.train is missing; add to"):
        load_config(tmp_path / "part.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("run: {name: é}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.yaml is not a text in UTF-8: .* at byte 12"):
        load_config(tmp_path / "latin.yaml")


def test_the_layout_must_fill_the_devices(config_file: Path) -> None:
    config: Config = load_config(config_file, ["train.parallel.tp=2", "train.parallel.pp=2"])
    with pytest.raises(ConfigError, match=r"tp 2 x pp 2 x cp 1 x dp 1 = 4 ranks, but placement.num_devices is 2"):
        config.parallel()
    assert load_config(config_file).parallel().dp == 2


@pytest.mark.parametrize(("text", "size"), [("512MiB", 2**29), ("1.5GiB", 3 * 2**29), (7, 7), ("10", 10)])
def test_sizes_are_read(text: object, size: int) -> None:
    assert parse_size(text) == size


def test_the_reference_page_is_up_to_date_and_leaves_nothing_undescribed() -> None:
    assert all(meaning != "None" for _, _, meaning in reference())
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert page.read_text() == reference_page(), "run: python -m yatt_mm.config.reference_page > docs/configuration.md"


def test_the_two_configs_with_a_judge_differ_in_their_placement_alone() -> None:
    full, partial = (
        _flat(load_config(CONFIGS / f"judge_{name}_cpu.yaml").model_dump()) for name in ("full", "partial")
    )
    assert full.keys() == partial.keys()
    assert {key for key in full if full[key] != partial[key]} <= {
        "run.name",
        "placement.mode",
        "placement.decide_every_s",
        "rollout.max_groups_per_engine",
        "reward.judges.digits.max_groups_per_engine",
        "reward.judges.digits.num_engines",
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by dotted key."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values
