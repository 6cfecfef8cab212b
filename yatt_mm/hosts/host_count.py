"""How many hosts a run uses: all that its config names, or fewer while some are away and `faults.shrink` allows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from yatt_mm.common.errors import ConfigError, WorkerError
from yatt_mm.config.judge_section import JudgeSection
from yatt_mm.config.run_config import Config
from yatt_mm.hosts.devices import Devices, bundle_of, reserved_devices
from yatt_mm.preflight.host_checks import check_hosts
from yatt_mm.preflight.placement_checks import check_placement

ALL_S = 30.0
"""The seconds in which all hosts must be there before a run goes on with fewer."""
FEWER_S = 5.0
"""The seconds in which a smaller number of hosts must be there."""
AGAIN_S = 30.0
"""The seconds between two reservations for missing hosts, where the first one fell on a host that the run has."""
LOOK_S = 2.0
"""The seconds between two looks whether missing hosts are there."""


def on_hosts(config: Config, num: int) -> Config:
    """Return the config of the run on this number of hosts, with as many engines and replicas on each as before.

    Raises:
        ConfigError: it cannot be divided so.
    """
    section = config.placement
    before, per_host = section.num_hosts, section.devices_per_host
    assert per_host is not None

    def part(key: str, count: int) -> int:
        if count * num % before:
            raise ConfigError(f"{key} is {count} on {before} hosts, of which {num} cannot have a whole share")
        return count * num // before

    def judge(name: str, one: JudgeSection) -> JudgeSection:
        if one.url is not None:
            return one
        return one.model_copy(update={"num_engines": part(f"reward.judges.{name}.num_engines", one.num_engines)})

    judges, engines = config.reward.judges, config.rollout.num_engines
    if not config.is_partial:  # else each device has one of each
        judges = {name: judge(name, one) for name, one in judges.items()}
        engines = None if engines is None else part("rollout.num_engines", engines)
    sizes = {
        key: part(f"placement.{key}", value)
        for key in ("rollout_devices", "min_rollout_devices", "min_genrm_devices")
        if (value := getattr(section, key))
    }
    fewer = config.model_copy(
        update={
            "placement": section.model_copy(update={"num_devices": num * per_host, **sizes}),
            "rollout": config.rollout.model_copy(update={"num_engines": engines}),
            "reward": config.reward.model_copy(update={"judges": judges}),
        }
    )
    fewer.parallel()
    check_placement(fewer)
    check_hosts(fewer)
    return fewer


def possible_counts(config: Config) -> list[int]:
    """Return the numbers of hosts on which a run could be, from all of them down."""
    return [num for num in range(config.placement.num_hosts, 0, -1) if _fits(config, num)]


def _fits(config: Config, num: int) -> bool:
    try:
        on_hosts(config, num)
    except ConfigError:
        return False
    return True


def fitting_hosts(config: Config, tell: Callable[[str], None]) -> Config:
    """Return the config of a run for the hosts that the cluster has now: its own, or one for fewer hosts if
    `faults.shrink` is set. `tell` gets a line in the second case."""
    if not config.faults.shrink:
        return config
    wanted, *fewer = possible_counts(config)
    per_host = config.placement.devices_per_host
    assert per_host is not None
    for num in (wanted, *fewer):
        try:
            with reserved_devices(num * per_host, num, deadline_s=ALL_S if num == wanted else FEWER_S):
                pass
        except WorkerError:
            continue
        if num < wanted:
            tell(f"{num} of {wanted} hosts are there; the run goes on with them (faults.shrink)")
        return on_hosts(config, num)
    return config  # the start waits for hosts longer, and says what is missing


class MissingHosts:
    """Waits for hosts that a run lacks: the fewest further ones with which it could use more."""

    def __init__(self, devices: Devices, num: int) -> None:
        """`num`: how many hosts it waits for. `devices`: those of the run."""
        self.num = num
        self._own = {node.id for node in devices.nodes}
        self._bundle = bundle_of(devices.per_host, use_gpus=bool(devices.gpus))
        self._group: PlacementGroup | None = None
        self._not_before_s = 0.0

    def are_there(self) -> bool:
        """Return True if they are there, and have the devices free. Does not wait."""
        if time.monotonic() < self._not_before_s:
            return False
        self._not_before_s = time.monotonic() + LOOK_S
        if self._group is None:
            self._group = placement_group([self._bundle] * self.num, strategy="STRICT_SPREAD")
        if not self._group.wait(timeout_seconds=0):
            return False
        found = set(placement_group_table(self._group)["bundles_to_node_id"].values())
        self.close()
        if found & self._own:
            self._not_before_s = time.monotonic() + AGAIN_S
            return False
        return True

    def close(self) -> None:
        """Give up what was reserved."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


@contextmanager
def missing_hosts(config: Config, on_fewer: Config, devices: Devices) -> Iterator[MissingHosts | None]:
    """Yield what waits for the hosts that a run lacks; None if it lacks none. `on_fewer`: the config with which it
    runs."""
    now = on_fewer.placement.num_hosts
    more = [num for num in possible_counts(config) if num > now] if config.faults.shrink else []
    if not more:
        yield None
        return
    missing = MissingHosts(devices, min(more) - now)
    try:
        yield missing
    finally:
        missing.close()
