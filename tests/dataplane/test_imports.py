"""What the data plane's modules may import, seen in a fresh process."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "vllm", "ray", "decord", "models", "yatt_mm")


def imported_by(module: str) -> set[str]:
    code = f"import {module}, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", ["dataplane.client.client", "dataplane.client.embedded", "dataplane.cli.main"])
def test_the_control_side_imports_neither_pillow_nor_what_maps_memory(module: str) -> None:
    found = imported_by(module)
    forbidden = (*HEAVY, "PIL", "dataplane.client.reader", "dataplane.client.lease_session", "dataplane.storage.arena")
    assert not found & set(forbidden)


@pytest.mark.parametrize(
    "module",
    ["dataplane.client.reader", "dataplane.server.node", "dataplane.client.torch_view", "dataplane.derive.worker_main"],
)
def test_the_data_plane_knows_nothing_of_torch_models_or_training(module: str) -> None:
    assert not imported_by(module) & set(HEAVY)


def test_refs_need_only_the_standard_library() -> None:
    assert not imported_by("dataplane.core.refs") & {"numpy", "pyarrow", "blake3"}
