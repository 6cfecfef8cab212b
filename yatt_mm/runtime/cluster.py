"""Ray for one run: the run's own local cluster, or a connection to an existing one."""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services, utils, worker
from ray._raylet import (  # type: ignore[attr-defined]  # a compiled module
    AuthenticationTokenLoader,
    Config,
)
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from yatt_mm.common.errors import ConfigError, WorkerError
from yatt_mm.common.held_memory import GPUS_VARIABLE
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.common.tokens import write_token
from yatt_mm.runtime.signals import set_signals_again
from yatt_mm.runtime.supervised import LIFELINE

CONNECT_TIMEOUT_S = 10.0
START_TIMEOUT_S = 120.0
POLL_S = 0.5
RAY_TOKEN = "ray_token"
"""The name of the file with Ray's token."""
OBJECT_STORE_BYTES = 100 * 2**20
"""The size of Ray's object store. It is small, because Ray carries calls and refs only, and all large data goes through
the data plane."""


@contextmanager
def ray_session(address: str | None, *, num_cpus: int, scratch: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Connect to Ray for a block. Without an address Ray is started here and stopped at the end.

    `env` is set in every worker process.
    """
    before, processes, watching = dict(os.environ), dict[str, Any](), threading.Event()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "configure_logging": False,
    }
    try:
        with _our_signals():
            if address is not None:
                _connect(address, runtime_env={"env_vars": dict(env)}, **common)
            else:
                os.environ.update(env)  # a local Ray passes the environment to its workers
                os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(write_token(scratch / RAY_TOKEN)))
                os.environ.pop("RAY_AUTH_TOKEN", None)  # it would count before the file
                _read_environment()
                _start(num_cpus=num_cpus, _temp_dir=str(scratch / "ray"), **common)
                processes = _servers()
        threading.Thread(target=_watch_servers, args=(processes, watching), name="Ray's servers", daemon=True).start()
        yield
    finally:
        watching.set()
        _stop()
        os.environ.clear()
        os.environ.update(before)
        _read_environment()


def _start(**options: Any) -> None:
    """Start a local cluster for this run. It listens on loopback alone, and every call to it must show a token that
    only this user can read.

    Raises:
        WorkerError: Ray's processes did not start in `START_TIMEOUT_S`, which can happen on a busy machine.
    """
    try:
        with _on_loopback(), _patient():
            ray.init(include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **options)
    except Exception as error:  # Ray has no error class of its own for this
        raise WorkerError(
            f"Ray could not start on this machine: {error} The load is {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
            "processors; try again when it is lower, or name a running cluster in ray.address"
        ) from error


def _servers() -> dict[str, Any]:
    """Return the processes, started here, without which no call of Ray comes to an end."""
    node: Any = worker._global_node
    return {kind: node.all_processes[kind][0].process for kind in ("gcs_server", "raylet")}


def _watch_servers(servers: Mapping[str, Any], is_over: threading.Event) -> None:
    """End this process as soon as a server of Ray is gone, unless it has no supervisor. Its calls of Ray would only end
    after a minute, and then end it too."""
    while not is_over.wait(POLL_S):
        for kind, process in servers.items():
            status = process.poll()
            if status is not None and not is_over.is_set():
                LIFELINE.end(f"Ray's {kind} is gone (status {status})")


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a cluster that starts during the block have no other address than 127.0.0.1. Ray does the same by itself
    where it supports clusters of one machine only."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _patient() -> Iterator[None]:
    """Let the processes of a cluster that starts during the block have `START_TIMEOUT_S`. Ray gives them 30 s after its
    first question for the new node has failed, which is not enough where several runs start at the same time."""
    before, deadline_s = services.get_node, time.monotonic() + START_TIMEOUT_S

    def get_node(*arguments: Any) -> Any:
        while True:
            try:
                return before(*arguments)
            except RuntimeError:  # the node is not known yet
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(0.1)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = before


def _read_environment() -> None:
    """Let Ray read its settings from the environment again; it reads them once, when it is imported."""
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


def asks_for_no_token() -> bool:
    """Return True if the cluster to which this process is connected answers a call that shows no token."""
    import grpc

    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", timeout=CONNECT_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return True


def _stop() -> None:
    """Disconnect from Ray, and stop the processes that were started here.

    Ray's core gives signals their default effect when it ends, and a second signal would end the launcher before its
    folders are removed. So the handlers of signals are set again before Ray's processes end, which takes a second.
    """
    node: Any = worker._global_node
    if node is not None:
        end_processes = node.kill_all_processes

        def end_processes_with_our_handlers(**options: Any) -> None:
            set_signals_again()
            end_processes(**options)

        node.kill_all_processes = end_processes_with_our_handlers
    ray.shutdown()
    set_signals_again()


@contextmanager
def _our_signals() -> Iterator[None]:
    """Leave signals to the launcher alone, which stops the run in order, while Ray starts during a block.

    Ray starts its processes in process groups of their own: a signal to the launcher's group (Ctrl-C in a terminal,
    `timeout`, schedulers) does not reach them, and Ray does not wait a minute for processes that are gone. And Ray
    installs no handler of SIGTERM, which would end the launcher at once.
    """
    starting, setting = (services, "ConsolePopen"), (utils, "set_sigterm_handler")
    before = [(module, name, getattr(module, name)) for module, name in (starting, setting)]
    setattr(*starting, functools.partial(services.ConsolePopen, process_group=0))
    setattr(*setting, lambda handler: None)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _connect(address: str, **options: Any) -> None:
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection(
                (host, int(port)), timeout=CONNECT_TIMEOUT_S
            ).close()  # Ray's own attempt ends the process
        ray.init(address=address, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ray.address is {address!r}: {error}; name a running cluster, or leave it out to start Ray here"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices that Ray reserved for a run: one bundle per device."""

    group: PlacementGroup
    gpus: tuple[str, ...]
    """[device] the machine's name for its GPU: a number or a UUID. Empty where devices are CPU slots."""

    def beside(self, devices: Sequence[int]) -> dict[str, Any]:
        """Return options that put an actor on these devices without claiming them, because roles take turns."""
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=devices[0]
            ),
        }
        if self.gpus:
            gpus = ",".join(self.gpus[device] for device in devices)
            options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": gpus, GPUS_VARIABLE: gpus}}
        return options


@contextmanager
def reserved_devices(num_devices: int, *, deadline_s: float) -> Iterator[Devices]:
    """Reserve GPUs for a `with` block, or CPU slots where the cluster has none; yield which they are.

    Raises:
        WorkerError: the cluster does not have them free in time.
    """
    use_gpus = ray.cluster_resources().get("GPU", 0) > 0
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
        yield Devices(group=group, gpus=_gpus_of(group, num_devices, deadline_s) if use_gpus else ())
    finally:
        remove_placement_group(group)


def _gpus_of(group: PlacementGroup, num_devices: int, deadline_s: float) -> tuple[str, ...]:
    """Return for each device the GPU that Ray gave its bundle. It differs from the device's number where others use the
    machine too."""

    def own() -> str:
        (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return str(gpu)

    remote: Any = ray.remote(num_cpus=0, num_gpus=1)(own)
    strategies = (PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=d) for d in range(num_devices))
    calls = [remote.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    named = [(f"device {device}", call) for device, call in enumerate(calls)]
    return tuple(wait_all(named, what="naming its GPU", deadline_s=deadline_s))
