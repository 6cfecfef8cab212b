"""Tests of names of the Hugging Face hub: a server behind HF_ENDPOINT serves a model and a set, and then the cache."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from tests.yatt_mm import runs
from tests.yatt_mm.preflight import published
from tests.yatt_mm.preflight.hub_server import COMMIT, hub
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import load_config
from yatt_mm.preflight.hub import HubName, hub_name_of, with_local_paths

SCRIPT = """
import json, sys
from pathlib import Path
from rich.console import Console
from models.recipes.media_recipes import load_recipes
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from tests.yatt_mm import runs
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import load_config
from yatt_mm.preflight.first_samples import check_first_samples
from yatt_mm.preflight.hub import with_local_paths
from yatt_mm.preflight.run_checks import check_model
from yatt_mm.preflight.run_sets import find_train_sets

def look(overrides):
    path, *rest = runs.arguments(Path("unused"), Path("unused"), "hub", "train.steps=1", *overrides)
    config = with_local_paths(load_config(path, rest), Console())
    check_model(config)
    roots = {"train": [config.data.train[0].path], "eval": [config.data.eval]}
    media_roots = [Path(root) for root in config.data.media_roots]
    with EmbeddedNode(memory_bytes=16 << 20, roots=roots, media_roots=media_roots) as node, Client(node.uri) as client:
        for found in find_train_sets(client, config):
            first = check_first_samples(client, config, load_recipes(Path(config.model.path)), found)
            print("FOUND", found.run_set.num_samples, found.run_set.layout.name, first.words)

for overrides in json.loads(sys.argv[1]):
    try:
        look(overrides)
    except ConfigError as error:
        print("ERROR", error)
    print("END")
"""
"""Looks at a config with one list of overrides after another."""
NAMES = ("model.path=Owner/tiny", "data.train=Owner/chats:train", "data.eval=Owner/chats:test")


def start(environment: Mapping[str, str], home: Path, *overrides: Sequence[str]) -> list[str]:
    """Look at configs in a process of its own, whose cache is in a folder, and return what it says of each."""
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([[*NAMES, *some] for some in overrides])],
        cwd=runs.ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("END\n")[:-1]


@pytest.mark.parity
def test_a_model_and_a_set_come_from_the_hub_once_and_then_from_the_cache(tiny_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_dir, tmp_path / "model"))
    (model / "pytorch_model.bin").write_bytes(b"the same weights once more")
    published.write_all(tmp_path / "sets")
    chats = tmp_path / "chats"
    shutil.copytree(tmp_path / "sets" / "pictures", chats / "pictures")
    for split in ("train", "test"):
        shutil.copy(tmp_path / "sets" / "llava.json", chats / f"{split}.json")
    found = f"FOUND {published.NUM_SAMPLES} LLaVA or ShareGPT 1 image each"
    with hub({"models/Owner/tiny": model, "datasets/Owner/chats": chats}) as server:
        at_the_server, home = {"HF_ENDPOINT": server.address}, tmp_path / "home"
        (said,) = start(at_the_server, home, [])
        assert found in said and "model.path: Owner/tiny of the Hugging Face hub" in said
        assert {"config.json", "model.safetensors", "0.jpg"} <= set(server.downloaded)
        assert "pytorch_model.bin" not in server.downloaded
        server.downloaded.clear()
        again, missing = start(at_the_server, home, [], ["model.path=Owner/none"])
        assert found in again and not {"config.json", "model.safetensors", "0.jpg"} & set(server.downloaded)
        assert (
            "ERROR model.path is Owner/none: there is no such folder" in missing
            and "the hub has no such model" in missing
        )
    offline, unknown = start({"HF_HUB_OFFLINE": "1"}, home, [], ["data.train=Owner/other"])
    assert found in offline
    assert "ERROR data.train is Owner/other" in unknown and "it is not in the cache" in unknown
    assert "(hf download Owner/other --repo-type dataset)" in unknown
    assert COMMIT in str(next(home.rglob("train.json")))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", HubName(name="Qwen/Qwen2.5-VL-7B-Instruct", revision=None, split=None)),
        ("hiyouga/geometry3k:train", HubName(name="hiyouga/geometry3k", revision=None, split="train")),
        ("o/n@v1.0:test#media=scan", HubName(name="o/n", revision="v1.0", split="test")),
        ("o/n@refs/pr/3", HubName(name="o/n", revision="refs/pr/3", split=None)),
        ("data/train-*.tar", None),
        ("/data/train", None),
        ("a/b/c", None),
        ("name", None),
        ("s3://bucket/a", None),
        ("tests/nothing", None),
        ("configs/digits_cpu.yaml", None),
    ],
)
def test_a_name_of_the_hub_is_told_from_a_path(
    text: str, name: HubName | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.ROOT)
    assert hub_name_of(text) == name


def test_a_config_without_names_stays_as_it_is(tiny_dir: Path) -> None:
    path, *rest = runs.arguments(Path("/tmp/unused"), tiny_dir, "hub", "train.steps=1")
    config, console = load_config(runs.ROOT / path, rest), Console(file=io.StringIO())
    assert with_local_paths(config, console) == config


def test_a_reference_keeps_its_other_keys_and_is_left_out_of_an_evaluation(tiny_dir: Path, tmp_path: Path) -> None:
    keys = ("algorithm.kl.where=loss", f"reference.path={tiny_dir}", "reference.renew_every=5")
    path, *rest = runs.arguments(tmp_path, tiny_dir, "hub", "train.steps=1", *keys)
    config, console = load_config(runs.ROOT / path, rest), Console(file=io.StringIO())
    assert with_local_paths(config, console).reference == config.reference
    assert with_local_paths(config, console).reference.renew_every == 5
    named = load_config(runs.ROOT / path, [*rest, "reference.path=Owner/not-there"])
    assert with_local_paths(named.for_evaluation(tmp_path / "evaluation"), console).references is None


def test_a_critic_keeps_its_other_keys_and_is_left_out_of_an_evaluation(tiny_dir: Path, tmp_path: Path) -> None:
    keys = ("algorithm.name=ppo", "algorithm.clip_high=null", f"critic.path={tiny_dir}", "critic.lr=1e-4")
    path, *rest = runs.arguments(tmp_path, tiny_dir, "hub", "train.steps=1", *keys)
    config, console = load_config(runs.ROOT / path, rest), Console(file=io.StringIO())
    assert with_local_paths(config, console).critic == config.critic and config.critic.lr == 1e-4
    named = load_config(runs.ROOT / path, [*rest, "critic.path=Owner/not-there"])
    assert with_local_paths(named.for_evaluation(tmp_path / "evaluation"), console).critic.path is None


def test_a_name_that_the_hub_does_not_allow_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path, *rest = runs.arguments(tmp_path, Path("Owner/no..name"), "hub", "train.steps=1")
    why = r"model\.path is Owner/no\.\.name: there is no such folder, .*cannot be downloaded: Cannot have -- or \.\."
    with pytest.raises(ConfigError, match=why):
        with_local_paths(load_config(runs.ROOT / path, rest), Console(file=io.StringIO()))
