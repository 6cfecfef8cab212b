"""Checks that a run over several hosts can be divided among them: nothing that must stay on one host lies on two."""

from __future__ import annotations

from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.placement_model import Role


def check_hosts(config: Config) -> None:
    """Check `placement.devices_per_host` and what depends on it.

    Raises:
        ConfigError: the run cannot be divided among hosts in this way.
    """
    section = config.placement
    per_host = section.devices_per_host
    if per_host is None or per_host == section.num_devices:
        return
    if section.num_devices % per_host:
        raise ConfigError(
            f"placement.num_devices is {section.num_devices} and placement.devices_per_host {per_host}; every host "
            "gives as many devices, so make the first a multiple of the second"
        )
    if config.ray.address is None:
        raise ConfigError(
            f"placement.devices_per_host is {per_host} of {section.num_devices} devices (placement.num_devices), so "
            f"the run needs {section.num_hosts} hosts, but ray.address is not set; start Ray on the hosts and name the "
            "cluster there (docs/clusters.md), or leave placement.devices_per_host out"
        )
    if config.dataplane.uri is not None:
        raise ConfigError(
            f"dataplane.uri names one node, and a run over {section.num_hosts} hosts starts one on each; leave it out"
        )
    if config.carrier == "nccl":
        raise ConfigError(
            "weights.carrier is nccl, whose members meet in files of one host, and the run has "
            f"{section.num_hosts} hosts; set it to auto or shm, with which each host's engines read what its own ranks "
            "wrote"
        )
    _check_units(config, per_host)
    if config.trains:
        _check_tensor_groups(config, per_host)


def _check_units(config: Config, per_host: int) -> None:
    """Check that the devices of each engine are on one host."""
    for unit in config.make_placement().units:
        if len({device // per_host for device in unit.devices}) > 1:
            key = "rollout.tp" if unit.role is Role.ROLLOUT else f"reward.judges.{unit.pool}.tp"
            raise ConfigError(
                f"{unit} would have devices {unit.devices[0]} to {unit.devices[-1]} ({key} is {len(unit.devices)}), "
                f"which are on two hosts, because placement.devices_per_host is {per_host}; an engine stays within a "
                f"host, so make {key} a divisor of {per_host}"
            )


def _check_tensor_groups(config: Config, per_host: int) -> None:
    """Check that ranks which exchange activations in every layer are on one host."""
    wanted, parallel = config.train.parallel, config.parallel()
    for key, size in (("tp", wanted.tp), ("etp", wanted.etp)):
        if per_host % size:
            nearest = max(divisor for divisor in range(1, size + 1) if per_host % divisor == 0 and size % divisor == 0)
            instead = f"{key} {nearest}"
            if key == "tp":
                instead += f" and pp {parallel.pp * (size // nearest)}"
            raise ConfigError(
                f"train.parallel.{key} is {size}, and placement.devices_per_host {per_host}: tensor-parallel ranks "
                f"exchange activations in every layer, so they stay within a host; the nearest layout that does is "
                f"{instead}"
            )
