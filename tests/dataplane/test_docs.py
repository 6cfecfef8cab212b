"""Tests that the examples of docs/dataplane.md run as they are written."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.client.embedded import EmbeddedNode
from tests.dataplane.clips import h264

DOCS = Path(__file__).parents[2] / "docs" / "dataplane.md"


def blocks(kind: str, path: Path = DOCS) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", path.read_text(), re.DOTALL)


def test_every_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    prepare, *examples = blocks("python")
    exec(prepare, names)
    command = shlex.split(blocks("serve")[0].replace("8815", "0"))
    environ = os.environ | {"PYTHONPATH": str(DOCS.parents[1])}
    node = subprocess.Popen([sys.executable, *command[1:]], stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert node.stdout is not None
        uri = node.stdout.readline().split("serving at ")[1].split()[0]
        environ["DATAPLANE_URI"] = uri
        for line in blocks("bash")[0].strip().splitlines():
            done = subprocess.run([sys.executable, *shlex.split(line)[1:]], env=environ, capture_output=True, text=True)
            assert done.returncode == 0, (line, done.stderr)
        assert Path("copy.png").read_bytes() == Path("cat.png").read_bytes()
        assert len(examples) == 2
        for example in examples:
            exec(example.replace("grpc://127.0.0.1:8815", uri), names)
        node.send_signal(signal.SIGINT)
        assert node.wait(60) == 0
    finally:
        node.kill()
        node.wait()
        node.stdout.close()  # type: ignore[union-attr]


def test_the_example_with_a_video_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clip.mp4").write_bytes(h264())
    (example,) = blocks("python", DOCS.with_name("dataplane-media.md"))
    with EmbeddedNode(memory_bytes=16 << 20, roots={}) as node:
        exec(example.replace("grpc://127.0.0.1:8815", node.uri), {})
