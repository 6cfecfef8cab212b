"""What the creation of a run's actors needs: where they run, what they get, what ends them, and where they log."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt_mm.common.cores import core_of
from yatt_mm.config.run_config import Config
from yatt_mm.hosts.run_hosts import RunHost, RunHosts
from yatt_mm.hosts.run_node import RunNode
from yatt_mm.protocol.placement_model import Placement
from yatt_mm.runtime.actors import create

SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables of the environment that name a network device to gloo and NCCL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the creation of actors needs: where they run, what they get, and what ends them."""

    stack: ExitStack
    config: Config
    node: RunNode
    placement: Placement
    hosts: RunHosts

    def cores(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Return the processor cores to which these CPU devices are bound; empty if devices are not bound to cores."""
        is_pinned = self.config.placement.pin_cores and not self.hosts.devices.gpus
        return tuple(core_of(self.hosts.devices.place_on_host(device)) for device in devices) if is_pinned else ()

    def host(self, devices: Sequence[int]) -> RunHost:
        """Return the host that has these devices."""
        return self.hosts.with_these(devices)

    def node_id(self, devices: Sequence[int]) -> str:
        """Return the id of the data-plane node beside these devices; empty in a run on one host."""
        return self.host(devices).node_id if self.hosts.nodes else ""

    def create(self, body: type, devices: Sequence[int], *, log: str, concurrency: int) -> Any:
        """Return the constructor of an actor on these devices. `log`: the name of its log file."""
        log_path, options = log_file(self.config, log), self.hosts.devices.beside(devices)
        if interface := self.host(devices).interface:
            own = {name: interface for name in SOCKET_VARIABLES if name not in self.config.ray.env}
            options["runtime_env"] = {"env_vars": {**options.get("runtime_env", {}).get("env_vars", {}), **own}}
        return create(self.stack, body, log=log_path, concurrency=concurrency, **options)


def log_file(config: Config, name: str) -> Path:
    """Return the path of the log file of one process of the run."""
    return config.log_dir / f"{name}.log"
