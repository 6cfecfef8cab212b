"""What the creation of a run's actors needs: the devices that Ray reserved for them, what they get, what ends them, and
where they log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from yatt_mm.common.cores import core_of
from yatt_mm.common.errors import WorkerError
from yatt_mm.common.held_memory import GPUS_VARIABLE
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.placement_model import Placement
from yatt_mm.runtime.actors import create
from yatt_mm.runtime.run_node import RunNode


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the creation of actors needs: where they run, what they get, and what ends them."""

    stack: ExitStack
    config: Config
    node: RunNode
    placement: Placement
    devices: Devices

    @property
    def model_dir(self) -> str:
        """The model folder as an absolute path, for processes with another working directory."""
        return str(Path(self.config.model.path).absolute())

    def cores(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the processor cores to which these CPU devices are bound; empty if devices are not bound to cores."""
        is_pinned = self.config.placement.pin_cores and not self.devices.gpus
        return tuple(map(core_of, devices)) if is_pinned else ()

    def create(self, body: type, devices: Sequence[int], *, log: str, concurrency: int) -> Any:
        """Return the constructor of an actor on these devices. `log`: the name of its log file."""
        log_path, options = log_file(self.config, log), self.devices.beside(devices)
        return create(self.stack, body, log=log_path, concurrency=concurrency, **options)


def log_file(config: Config, name: str) -> Path:
    """Return the path of the log file of one process of the run."""
    return config.log_dir / f"{name}.log"


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
