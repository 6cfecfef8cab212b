"""The devices that Ray reserved for a run: one bundle on each host, numbered host by host."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from yatt_mm.common.errors import WorkerError
from yatt_mm.common.held_memory import GPUS_VARIABLE
from yatt_mm.common.ray_calls import wait_all

A_LITTLE = 0.001
"""The share of a resource that only says where a bundle has to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A host as Ray knows it."""

    id: str
    address: str
    hostname: str

    def __str__(self) -> str:
        """Return the name that errors use."""
        return f"{self.hostname} ({self.address})"

    def placed(self) -> dict[str, Any]:
        """Return options that put an actor on this host."""
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self.id, soft=False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a run."""

    group: PlacementGroup
    bundles: tuple[int, ...]
    """[host] the number of its bundle."""
    nodes: tuple[RayNode, ...]
    """[host] where its bundle is; that of the launcher comes first."""
    per_host: int
    gpus: tuple[str, ...]
    """[device] the name that its host has for its GPU: a number or a UUID. Empty where devices are CPU slots."""

    def host_of(self, devices: Sequence[int]) -> int:
        """Return the number of the host that has these devices."""
        return devices[0] // self.per_host

    def place_on_host(self, device: int) -> int:
        """Return the number that a device has among those of its host."""
        return device % self.per_host

    def beside(self, devices: Sequence[int]) -> dict[str, Any]:
        """Return options that put an actor on these devices without claiming them, because roles take turns."""
        bundle = self.bundles[self.host_of(devices)]
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
        }
        if self.gpus:
            gpus = ",".join(self.gpus[device] for device in devices)
            options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": gpus, GPUS_VARIABLE: gpus}}
        return options


def bundle_of(per_host: int, *, use_gpus: bool) -> dict[str, float]:
    """Return what a run reserves on each host."""
    return {**({"GPU": float(per_host)} if use_gpus else {}), "CPU": float(per_host)}


def own_node() -> RayNode:
    """Return the host of this process."""
    wanted = ray.get_runtime_context().get_node_id()
    return next(node for node in _nodes() if node.id == wanted)


@contextmanager
def reserved_devices(num_devices: int, num_hosts: int = 1, *, deadline_s: float) -> Iterator[Devices]:
    """Reserve GPUs for a `with` block, or CPU slots where the cluster has none, as many on each host; yield which they
    are. One host is that of this process.

    Raises:
        WorkerError: the cluster does not have them free in time.
    """
    per_host = num_devices // num_hosts
    use_gpus = ray.cluster_resources().get("GPU", 0) > 0
    bundle = bundle_of(per_host, use_gpus=use_gpus)
    if num_hosts == 1:  # the parts of a run share memory with its launcher
        bundle |= {f"node:{own_node().address}": A_LITTLE}
    group = placement_group([bundle] * num_hosts, strategy="STRICT_SPREAD" if num_hosts > 1 else "PACK")
    try:
        if not group.wait(timeout_seconds=deadline_s):
            wanted, change = _words(bundle), "lower placement.num_devices"
            if num_hosts > 1:
                wanted = f"{num_hosts} x {wanted}, each on a host of its own,"
                change += " or placement.devices_per_host"
            raise WorkerError(
                f"Ray could not reserve {wanted} in {deadline_s:g} s; it has {'; '.join(_have(bundle))}; {change} or "
                "free devices"
            )
        by_bundle = placement_group_table(group)["bundles_to_node_id"]
        known, own = {node.id: node for node in _nodes()}, ray.get_runtime_context().get_node_id()
        if gone := set(by_bundle.values()) - known.keys():
            raise WorkerError(
                f"{len(gone)} of the {num_hosts} hosts that Ray had reserved died right after; start again"
            )
        placed = sorted(
            ((known[node_id], number) for number, node_id in by_bundle.items()),
            key=lambda one: (one[0].id != own, ipaddress.ip_address(one[0].address), one[0].id),
        )
        bundles = tuple(number for _, number in placed)
        yield Devices(
            group=group,
            bundles=bundles,
            nodes=tuple(node for node, _ in placed),
            per_host=per_host,
            gpus=_gpus_of(group, bundles, per_host, deadline_s) if use_gpus else (),
        )
    finally:
        remove_placement_group(group)


def _nodes() -> list[RayNode]:
    return [
        RayNode(id=node["NodeID"], address=node["NodeManagerAddress"], hostname=node["NodeManagerHostname"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def _words(bundle: dict[str, float]) -> str:
    return " and ".join(f"{num:g} {name}" for name, num in bundle.items() if not name.startswith("node:"))


def _have(bundle: dict[str, float]) -> list[str]:
    """Return a text about each host of the cluster: what it has of what is wanted."""
    return [
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}): "
        + _words({name: node["Resources"].get(name, 0.0) for name in bundle})
        for node in ray.nodes()
        if node["Alive"]
    ]


def _gpus_of(group: PlacementGroup, bundles: Sequence[int], per_host: int, deadline_s: float) -> tuple[str, ...]:
    """Return for each device the GPU that Ray gave its bundle. It differs from the device's number where others use the
    host too."""

    def own() -> list[str]:
        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]

    remote: Any = ray.remote(num_cpus=0, num_gpus=per_host)(own)
    strategies = (PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle) for bundle in bundles)
    calls = [remote.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    named = [(f"host {host}", call) for host, call in enumerate(calls)]
    return tuple(gpu for gpus in wait_all(named, what="naming its GPUs", deadline_s=deadline_s) for gpu in gpus)
