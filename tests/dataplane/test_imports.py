"""Tests what the data plane's modules import, in a fresh process."""

import importlib
import json
import subprocess
import sys

import pytest

import dataplane

HEAVY = ("torch", "transformers", "vllm", "ray", "av", "decord", "models", "yatt_mm")


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


def test_a_node_loads_nothing_that_only_some_need() -> None:
    assert not imported_by("dataplane.cli.serve") & {"fsspec", "rich", "prometheus_client", "http.server"}


def test_refs_need_only_the_standard_library() -> None:
    assert not imported_by("dataplane.core.refs") & {"numpy", "pyarrow", "blake3"}


PUBLIC = {
    "Client": "dataplane.client.client",
    "EmbeddedNode": "dataplane.client.embedded",
    "Reader": "dataplane.client.reader",
    "Ref": "dataplane.core.refs",
    "Writer": "dataplane.client.writer",
}


def test_every_public_name_is_the_class_of_its_module() -> None:
    assert sorted(dataplane.__all__) == sorted(PUBLIC)
    for name, module in PUBLIC.items():
        assert getattr(dataplane, name) is getattr(importlib.import_module(module), name)
        assert name in dir(dataplane)


def test_a_name_that_is_not_public_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        AttributeError, match="no public name 'Store'; it has Client, EmbeddedNode, Reader, Ref, Writer"
    ):
        _ = dataplane.Store


def test_the_package_itself_loads_none_of_its_modules() -> None:
    assert {name for name in imported_by("dataplane") if name.startswith("dataplane")} == {"dataplane"}


def test_a_controller_that_takes_its_client_from_the_package_maps_nothing() -> None:
    code = "from dataplane import Client, Ref; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    found = set(json.loads(done.stdout))
    assert "dataplane.client.client" in found
    maps = {"dataplane.client.reader", "dataplane.client.writer", "dataplane.client.lease_session"}
    assert not found & (maps | {"PIL", *HEAVY})
