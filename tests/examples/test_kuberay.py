"""The manifest for KubeRay: its pods are pods of Kubernetes, and its numbers of hosts and devices agree."""

from __future__ import annotations

import shlex
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.yatt_mm.runs import ROOT
from yatt_mm.config.run_config import load_config

KUBERNETES = "1.34"


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


def test_the_run_takes_all_devices_of_all_pods_and_its_folder_is_shared(job: dict[str, Any]) -> None:
    words = shlex.split(job["entrypoint"])
    folder, overrides = words[1], [word for word in words if "=" in word and not word.startswith("--")]
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
