"""Tests which modules may import which: read from the sources, and seen in a fresh process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from yatt_mm.control import actor

ROOT = Path(__file__).parents[2]
CONTROLLER_SIDE = ("yatt_mm.train", "yatt_mm.control.actor", "yatt_mm.protocol.rewards", "dataplane.client.client")


def imported(file: Path) -> set[str]:
    """Return the modules that a file imports anywhere outside `if TYPE_CHECKING`."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text()))
    return names


def offenders(package: str, forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sorted((ROOT / package).rglob("*.py"))
        if not str(file.relative_to(ROOT)).startswith(allowed or ("\0",))
        for name in sorted(imported(file))
        if name.split(".")[0] in forbidden
    ]


def test_the_data_plane_knows_neither_torch_nor_models_nor_the_trainer() -> None:
    assert not offenders(
        "dataplane", ("torch", "transformers", "models", "yatt_mm"), ("dataplane/client/torch_view.py",)
    )


def test_models_know_neither_the_data_plane_nor_the_trainer() -> None:
    assert not offenders("models", ("dataplane", "yatt_mm"))


def test_vllm_is_imported_in_one_place() -> None:
    assert not offenders("yatt_mm", ("vllm",), ("yatt_mm/rollout/",))
    assert not offenders("dataplane", ("vllm",))
    assert not offenders("models", ("vllm",))


def test_megatron_stands_behind_two_doors() -> None:
    assert not offenders("yatt_mm", ("megatron",), ("yatt_mm/training/",))
    assert not offenders("models", ("megatron",), ("models/compat/",))
    assert not offenders("dataplane", ("megatron",))


@pytest.mark.parametrize("module", CONTROLLER_SIDE)
def test_a_controller_imports_nothing_that_holds_pixels(module: str) -> None:
    assert not loaded_with(module) & {*actor.FORBIDDEN_MODULES, "transformers"}


@pytest.mark.parametrize("module", ["yatt_mm.rollout.actor", "yatt_mm.training.actor", "yatt_mm.genrm.actor"])
def test_what_the_launcher_imports_of_engines_judges_and_ranks_is_light(module: str) -> None:
    assert not loaded_with(module) & {"torch", "vllm", "transformers", "megatron"}


def loaded_with(module: str) -> set[str]:
    """Return all modules that a fresh process has when it has imported one."""
    code = f"import {module}, sys, json; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(json.loads(output.stdout))


@pytest.mark.parametrize("trains", [True, False])
def test_a_controller_looks_at_itself_when_it_has_ended(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = object.__new__(actor.ControllerActor)
    controller._controller = cast(Any, SimpleNamespace(config=SimpleNamespace(trains=trains), abort=pytest.fail))
    monkeypatch.setattr(actor, "train" if trains else "evaluate", lambda controller: 7)
    with EmbeddedNode(memory_bytes=2**20, roots={}) as node, Client(node.uri) as client:
        (segment,) = client.stat()["segments"]
        assert segment["path"].startswith(actor.SEGMENT_MARK)
        monkeypatch.setattr(actor, "SEGMENT_MARK", segment["path"])  # others may be mapped for other tests
        monkeypatch.setattr(actor, "sys", SimpleNamespace(modules={"numpy": np}))
        assert controller.run() == 7
        for name in actor.FORBIDDEN_MODULES:
            monkeypatch.setattr(actor, "sys", SimpleNamespace(modules={name: None}))
            with pytest.raises(AssertionError, match=f"a controller imported .'{name}'"):
                controller.run()
        monkeypatch.setattr(actor, "sys", SimpleNamespace(modules={"numpy": np}))
        with Reader(node.uri), pytest.raises(AssertionError, match="a controller maps segments of the data plane"):
            controller.run()
