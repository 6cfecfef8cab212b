"""Ray for one run: a local cluster of its own or a connection to an existing one; ended as it was begun."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from yatt_mm.errors import ConfigError, WorkerError
from yatt_mm.held_memory import GPUS_VARIABLE

CONNECT_TIMEOUT_S = 10.0
OBJECT_STORE_BYTES = 100 * 2**20
"""Ray carries calls and refs; what is heavy goes through the data plane."""


@contextmanager
def ray_session(
    address: str | None, *, num_cpus: int, scratch: Path, log_dir: Path, env: Mapping[str, str]
) -> Iterator[None]:
    """A Ray connection. Without an address Ray is started here, and stopped at the end; its logs are kept.

    `env` holds in every worker process.
    """
    before = dict(os.environ)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "configure_logging": False,
    }
    try:
        if address is not None:
            _connect(address, runtime_env={"env_vars": dict(env)}, **common)
        else:
            os.environ.update(env)  # a local Ray hands the environment on to its workers
            _start(num_cpus=num_cpus, _temp_dir=str(scratch / "ray"), **common)
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
        if address is None:
            _keep_logs(scratch / "ray", log_dir)


def _start(**options: Any) -> None:
    """A cluster of this run's own.

    Raises:
        WorkerError: Ray's processes did not come up, which on a busy machine takes them longer than they wait.
    """
    try:
        ray.init(include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **options)
    except Exception as error:  # Ray raises no type of its own
        raise WorkerError(
            f"Ray could not start on this machine: {error} The load is {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
            "processors; try again when it is lower, or name a running cluster in ray.address"
        ) from error


def _connect(address: str, **options: Any) -> None:
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection(
                (host, int(port)), timeout=CONNECT_TIMEOUT_S
            ).close()  # Ray's own try ends the process
        ray.init(address=address, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ray.address is {address!r}: {error}; name a running cluster, or leave it out to start Ray here"
        ) from error


@contextmanager
def reserved_devices(num_devices: int, *, use_gpus: bool, deadline_s: float) -> Iterator[PlacementGroup]:
    """One placement group with a bundle per device.

    Raises:
        WorkerError: the cluster does not have them free in time.
    """
    bundle = {"GPU": 1.0, "CPU": 1.0} if use_gpus else {"CPU": 1.0}
    group = placement_group([bundle] * num_devices, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=deadline_s):
            have = ray.cluster_resources()
            raise WorkerError(
                f"Ray could not reserve {num_devices} x {bundle} in {deadline_s:g} s; the cluster has "
                f"{ {name: have.get(name, 0.0) for name in bundle} }; lower placement.num_devices or free devices"
            )
        nodes = set(placement_group_table(group)["bundles_to_node_id"].values())
        if nodes != {ray.get_runtime_context().get_node_id()}:
            raise WorkerError(
                f"Ray reserved devices on {len(nodes)} machine(s), not all of them this one; the parts of a run share "
                "memory, so start it on the machine that has the devices"
            )
        yield group
    finally:
        remove_placement_group(group)


def on_devices(group: PlacementGroup, devices: Sequence[int], *, use_gpus: bool) -> dict[str, Any]:
    """Options that put an actor beside these devices, without claiming them: roles take turns."""
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=devices[0]),
    }
    if use_gpus:
        gpus = ",".join(map(str, devices))
        options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": gpus, GPUS_VARIABLE: gpus}}
    return options


def _keep_logs(ray_dir: Path, log_dir: Path) -> None:
    """Copy what the workers said (not Ray's own logs) into the run's folder."""
    for file in ray_dir.glob("session_*/logs/worker-*"):
        if file.is_file() and not file.is_symlink() and file.stat().st_size:
            log_dir.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, log_dir / file.name)
