"""The manifest for KubeRay: its pods are pods of Kubernetes, and its numbers of hosts and devices agree."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.yatt_mm.runs import ROOT
from yatt_mm.config.run_config import load_config

KUBERNETES = "1.34"
SHARED = "/shared"
NOTES = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([os.getcwd(), *sys.argv[1:]]))
"""
"""A program that prints where it was started, and its arguments."""


@pytest.fixture
def job() -> dict[str, Any]:
    """The specification of the job."""
    return yaml.safe_load((ROOT / "examples" / "kuberay" / "train.yaml").read_text())["spec"]


def groups_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_every_pod_fits_the_schema_of_kubernetes(job: dict[str, Any]) -> None:
    for group in groups_of(job):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "host"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.fixture
def started(job: dict[str, Any], tmp_path: Path) -> tuple[str, list[str]]:
    """The folder and the words of the command that the head pod runs. They come there through two shells: KubeRay
    pastes the entrypoint into one, and Ray joins the words that it gets to a line for the other."""
    for name in ("ray", "python"):
        (tmp_path / name).write_text(NOTES)
        (tmp_path / name).chmod(0o755)

    def run(line: str, **variables: str) -> list[str]:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        return list(json.loads(subprocess.run(["bash", "-ce", line], env=env, capture_output=True, check=True).stdout))

    (tmp_path / "shared").mkdir()
    entrypoint = job["entrypoint"].replace(SHARED, str(tmp_path / "shared"))
    submitted = run(f"ray job submit --address http://head:8265 -- {entrypoint} ;", RAY_ADDRESS="http://head:8265")
    words = submitted[submitted.index("--") + 1 :]
    folder, *command = run(shlex.join(words), RAY_ADDRESS="10.0.0.1:6379")
    return folder.replace(str(tmp_path / "shared"), SHARED), command


def test_the_run_takes_all_devices_of_all_pods_and_its_folder_is_shared(
    job: dict[str, Any], started: tuple[str, list[str]]
) -> None:
    folder, words = started
    assert words[:3] == ["-m", "yatt_mm.train", "your.yaml"] and "ray.address=10.0.0.1:6379" in words
    overrides = [word for word in words if "=" in word and not word.startswith("--")]
    config = load_config("configs/digits_cpu.yaml", overrides)
    num_hosts = sum(group.get("replicas", 1) for group in groups_of(job))
    assert config.placement.devices_per_host and num_hosts > 1
    assert config.placement.num_devices == num_hosts * config.placement.devices_per_host
    for group in groups_of(job):
        (container,) = group["template"]["spec"]["containers"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == config.placement.devices_per_host
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert "persistentVolumeClaim" in mounted[folder]
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory", "the default of /dev/shm is 64 MiB"
