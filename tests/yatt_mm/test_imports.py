"""Tests which modules may import which: read from the sources, and seen in a fresh process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert not loaded_with(module) & {"torch", "vllm", "PIL", "av", "decord", "transformers", "dataplane.client.reader"}


@pytest.mark.parametrize("module", ["yatt_mm.rollout.actor", "yatt_mm.training.actor", "yatt_mm.genrm.actor"])
def test_what_the_launcher_imports_of_engines_judges_and_ranks_is_light(module: str) -> None:
    assert not loaded_with(module) & {"torch", "vllm", "transformers", "megatron"}


def loaded_with(module: str) -> set[str]:
    """Return all modules that a fresh process has when it has imported one."""
    code = f"import {module}, sys, json; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(json.loads(output.stdout))
