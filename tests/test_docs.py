"""Tests that every block of code in the docs runs as it is written, alone: with the node and the files that its page
names, but without what other blocks import or define; and that links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataplane.server.actions import ACTIONS
from dataplane.server.do_exchange import EXCHANGES
from tests.dataplane.clips import h264
from tests.yatt_mm.keeper.rows import row
from yatt_mm.config.run_config import Config
from yatt_mm.config.yaml_file import read_tree
from yatt_mm.keeper.table import table_path, write_rows

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
ADDRESS = "grpc://127.0.0.1:8815"
"""The address that the docs use for a node."""
DEFAULT_NODE = "python -m dataplane serve --memory 64MiB"


def blocks(kind: str, page: Path) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL)


def test_every_kind_of_block_is_tried() -> None:
    kinds = {kind for page in PAGES for kind in re.findall(r"^```(\w+)", page.read_text(), re.MULTILINE)}
    assert kinds <= {"python", "bash", "serve", "yaml", "mermaid"}, "serve blocks of several hosts: test_peers.py"
    nums = {"dataplane.md": 3, "dataplane-datasets.md": 2, "dataplane-examples.md": 5, "dataplane-media.md": 1}
    assert {name: len(blocks("python", ROOT / "docs" / name)) for name in nums} == nums


@contextmanager
def node_of(page: Path) -> Iterator[str]:
    """Run the node that a page begins with, on a free port, during a `with` block; yield its address."""
    command = shlex.split((blocks("serve", page) or [DEFAULT_NODE])[0].split("\n")[0].replace("8815", "0"))
    command += [] if "--port" in command else ["--port", "0"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, *command[1:]], stdout=subprocess.PIPE, text=True, env=environ) as node:
        try:
            assert node.stdout is not None
            yield node.stdout.readline().split("serving at ")[1].split()[0]
            node.send_signal(signal.SIGINT)
            assert node.wait(60) == 0
        finally:
            node.kill()


def run_alone(block: str, uri: str) -> None:
    names: dict[str, Any] = {}
    try:
        exec(compile(block.replace(ADDRESS, uri), "a block of the docs", "exec"), names)
    finally:
        if "node" in names:
            names["node"].stop()


@pytest.mark.torch
@pytest.mark.parametrize("page", [page for page in PAGES if blocks("python", page)], ids=lambda page: page.name)
def test_every_block_of_python_and_of_commands_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "torch" in page.read_text():
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("clip.mp4").write_bytes(h264())
    write_rows(table_path(Path("runs/digits_cpu"), 0), [row(0, 0, split="eval")])
    first, *others = blocks("python", page)
    if ADDRESS not in first:
        run_alone(first, ADDRESS)  # it may make the files that the node serves
        first = ""
    with node_of(page) as uri:
        for line in (line for block in blocks("bash", page) for line in block.strip().splitlines()):
            command = [sys.executable, *shlex.split(line)[1:]]
            done = subprocess.run(command, env=os.environ | {"DATAPLANE_URI": uri}, capture_output=True, text=True)
            assert done.returncode == 0, (line, done.stderr)
        if page.name == "dataplane.md":
            assert Path("copy.png").read_bytes() == Path("cat.png").read_bytes(), "what its commands store comes back"
        for block in [first, *others]:
            run_alone(block, uri)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_title_that_are_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, title = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if title:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert title in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in titles}, link


@pytest.mark.parametrize("page", [page for page in PAGES if blocks("yaml", page)], ids=lambda page: page.name)
def test_every_block_of_yaml_is_a_part_of_a_run(page: Path) -> None:
    for block in blocks("yaml", page):
        tree = read_tree(ROOT / "configs" / "digits_cpu.yaml")
        for section, values in yaml.safe_load(block).items():
            assert section in Config.model_fields, f"{section} is no section of a run"
            tree[section] = tree.get(section, {}) | values
        Config.model_validate(tree)


def test_every_verb_stands_in_an_example() -> None:
    pages = [ROOT / "docs" / name for name in ("dataplane.md", "dataplane-examples.md")]
    text = "\n".join(block for page in pages for kind in ("python", "bash") for block in blocks(kind, page))
    wanted = [*ACTIONS, *EXCHANGES, "get_flight_info", "get_schema", "list_flights", "list_actions", "do_put", "do_get"]
    assert [verb for verb in wanted if not re.search(rf"\b{verb}\b", text)] == []
