"""Tests of what a run says at its start: about too few samples, and about a run that is finished already."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from dataplane.client.embedded import EmbeddedNode
from tests.yatt_mm import runs
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.control.controller import Controller
from yatt_mm.control.step_report import StepReport
from yatt_mm.protocol.step_meter import StepMeter
from yatt_mm.runtime import launch as launch_module
from yatt_mm.runtime import start_point
from yatt_mm.runtime.launch import launch
from yatt_mm.runtime.start_point import _warnings, find_start


def config_of(folder: Path, model: Path, *overrides: str) -> Config:
    path, *rest = runs.arguments(folder, model, "started", "train.steps=4", *overrides)
    return load_config(runs.ROOT / path, rest)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs.write_shard(tmp_path / "train-000000.tar", range(6))
    runs.write_shard(tmp_path / "eval-000000.tar", range(1000, 1003))
    return tmp_path


def test_more_prompts_per_step_than_samples_and_held_out_samples_in_training_are_told(folder: Path) -> None:
    assert list(_warnings(config_of(folder, folder), num_train=8)) == []
    (few,) = _warnings(config_of(folder, folder), num_train=6)
    assert few.startswith("train.prompts_per_step is 8, more than the 6 training samples")
    same = f"data.eval={folder}/train-*.tar"
    (both,) = _warnings(config_of(folder, folder, same), num_train=8)
    assert both.startswith("data.train and data.eval have 1 file(s) in common, such as ")
    judge = ("url=http://judges.example:8000/v1", "model=big", "api_key_env=KEY")
    away = config_of(folder, folder, *(f"reward.judges.away.{one}" for one in judge))
    (open_key,) = list(_warnings(away, num_train=8))
    assert open_key.startswith("reward.judges.away.url http://judges.example:8000/v1 is not encrypted")


@pytest.mark.parametrize(
    ("address", "is_open", "warns"),
    [("ray.example:6379", True, True), ("ray.example:6379", False, False), (None, True, False)],
)
def test_a_cluster_that_asks_for_no_token_is_told_with_what_to_do(
    address: str | None, is_open: bool, warns: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[str | None] = []

    @contextmanager
    def session(address: str | None, **options: Any) -> Iterator[None]:
        sessions.append(address)
        yield

    monkeypatch.setattr(launch_module, "ray_session", session)
    monkeypatch.setattr(launch_module, "asks_for_no_token", lambda: is_open)
    console = Console(file=io.StringIO(), width=200)
    config = config_of(folder, folder, *([f"ray.address={address}"] if address else []))
    with ExitStack() as stack:
        launch_module._enter_ray(stack, config, MagicMock(), console)
    assert sessions == [address] and isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert said.startswith("warning: the Ray cluster at ray.example:6379 asks for no token: ") == warns, said
    assert said.endswith("start it with RAY_AUTH_MODE=token, and set that and RAY_AUTH_TOKEN_PATH here\n") == warns


def test_a_run_that_goes_on_from_elsewhere_counts_the_checkpoint_of_its_first_step_as_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(launch_module, "LIFELINE", SimpleNamespace(loss=None, tell=told.update))
    config = config_of(folder, folder)
    for root, began_at in ((tmp_path / "elsewhere", 9), (Checkpoints.of_run(config.run_dir).root, 10)):
        checkpoints = Checkpoints(root=root, keep=1)
        checkpoints.begin(10)
        checkpoint = checkpoints.commit(10, {"step": 10})
        with ExitStack() as stack:
            launch_module._enter_folder(stack, config, checkpoint, 10, {}, Console(file=io.StringIO()))
        assert (told["began_at"], told["step"]) == (began_at, 10)


def test_a_finished_run_that_is_resumed_says_so_and_starts_nothing(folder: Path, tiny_dir: Path) -> None:
    config, console = config_of(folder, tiny_dir), Console(file=io.StringIO(), width=200)
    checkpoints = Checkpoints(root=config.run_dir / "checkpoints", keep=1)
    checkpoints.begin(4)
    checkpoints.commit(4, {"step": 4})
    (config.run_dir / "hf").mkdir()
    assert launch(config, resume="auto", console=console) == {}
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "is finished: " in said and "is of step 4, and train.steps is 4; raise train.steps to go on" in said
    assert not config.log_dir.exists()


def test_what_cannot_be_used_of_a_set_that_joins_at_a_resume_is_told_until_the_run_has_said_it(
    folder: Path, tiny_dir: Path
) -> None:
    runs.write_shard(folder / "joined.tar", range(6))
    os.truncate(folder / "joined.tar", (folder / "joined.tar").stat().st_size // 2)
    roots = {"train": [f"{folder}/train-*.tar"], "eval": [f"{folder}/eval-*.tar"], "joined": [f"{folder}/joined.tar"]}
    with EmbeddedNode(memory_bytes=16 * 2**20, roots=roots) as node:
        sets = ("data.train=train", "data.eval=eval", "eval.sets.joined.path=joined")
        config = config_of(folder, tiny_dir, f"dataplane.uri={node.uri}", *sets)
        fresh = find_start(config, node.uri, None, None)
        assert fresh.batches is not None
        (flaw,) = fresh.start.flaws
        assert (flaw["set"], flaw["shard"]) == ("joined", "joined.tar") and fresh.start.told == frozenset()
        state = {"step": 3} | fresh.batches.state()
        assert find_start(config, node.uri, folder, state).start.flaws == (flaw,), "the run had no such set before"

        bad = {"position": 1, "index": 1, "shard": "eval.tar", "key": "000001", "reason": "truncated"}
        notices = [
            {"step": 3, **flaw},
            {"step": 2, "set": "eval", **bad, "is_filtered": False},
            {"step": 2, "set": "train", **bad, "key": "of training", "is_filtered": True},
            {"step": 4, "set": "eval", **bad, "key": "of a step that is run again", "is_filtered": False},
        ]
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "quarantine.jsonl").write_text("".join(f"{json.dumps(notice)}\n" for notice in notices))
        resumed = find_start(config, node.uri, folder, state).start
        assert resumed.flaws == ()
        torn = ("joined", "joined.tar", flaw["key"], flaw["reason"])
        assert resumed.told == {torn, ("eval", "eval.tar", "000001", "truncated")}
        assert find_start(config, node.uri, None, None).start.flaws == (flaw,), "a fresh run tells of it again"


def test_a_start_that_takes_long_to_index_tars_says_how_the_next_one_is_faster(
    folder: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = {"train": [f"{folder}/train-*.tar"], "eval": [f"{folder}/eval-*.tar"]}
    with EmbeddedNode(memory_bytes=16 * 2**20, roots=roots) as node:
        for limit_s, overrides, num in ((0.0, (), 1), (60.0, (), 0), (0.0, (f"dataplane.index_dir={folder}",), 0)):
            monkeypatch.setattr(start_point, "SLOW_INDEX_S", limit_s)
            said = find_start(config_of(folder, tiny_dir, *overrides), node.uri, None, None).warnings
            assert sum("with dataplane.index_dir=FOLDER a later start" in line for line in said) == num


@pytest.mark.parametrize("begins", ["begin", "resume"])
def test_the_first_controller_alone_tells_of_flaws_at_a_start_and_at_a_resume(
    begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaw = {"shard": "joined.tar", "key": "", "reason": "torn", "is_filtered": False}
    for name in ("_publish", "evaluate", "phase"):
        monkeypatch.setattr(Controller, name, MagicMock())
    monkeypatch.setattr(StepReport, "hand_over", MagicMock())
    for index, wanted in ((0, [{"kind": "quarantine", "step": 3, **flaw}]), (1, [])):
        one: Any = object.__new__(Controller)
        one.index, one.step = index, 3
        one._start = SimpleNamespace(checkpoint="step_3", step=3, ranks_at=3, flaws=(flaw,))
        one._team = SimpleNamespace(restart_count=0)
        one._meter, one._workers, put_record = StepMeter(), MagicMock(), MagicMock(return_value=True)
        one._rendezvous = SimpleNamespace(put_record=put_record, gather=lambda value: [value], step=3)
        one._report = object.__new__(StepReport)
        one._report._rendezvous, one._report._meter = one._rendezvous, one._meter
        getattr(one, begins)()
        assert [call.args[0] for call in put_record.call_args_list] == wanted
        assert one._meter.take().sums.get("data/num_quarantined", 0) == len(wanted)
