"""Tests of the number of hosts on which a run can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yatt_mm import runs
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.hosts.host_count import on_hosts, possible_counts


def config_of(*overrides: str, num_hosts: int = 4) -> Config:
    path, *rest = runs.arguments(Path("unused"), Path("unused"), "hosts")
    hosts = ("ray.address=10.0.0.1:6379", "placement.devices_per_host=2", f"placement.num_devices={2 * num_hosts}")
    return load_config(runs.ROOT / path, [*rest, *hosts, f"rollout.num_engines={2 * num_hosts}", *overrides])


def test_fewer_hosts_have_as_many_engines_and_replicas_each() -> None:
    fewer = on_hosts(config_of("train.parallel.pp=2"), 3)
    assert fewer.placement.num_devices == 6 and fewer.placement.devices_per_host == 2
    assert fewer.rollout.num_engines == 6 and fewer.parallel().dp == 3 and fewer.parallel().pp == 2
    assert {fewer.make_placement().host_of(unit) for unit in fewer.make_placement().units} == {0, 1, 2}


@pytest.mark.parametrize(
    ("overrides", "counts"),
    [
        ((), [4, 3, 2, 1]),
        (("train.parallel.pp=4",), [4, 2]),
        (("train.parallel.dp=8",), [4]),
        (("rollout.num_engines=4",), [4, 3, 2, 1]),
        (("rollout.num_engines=2",), [4, 2]),
    ],
)
def test_the_layout_and_the_engines_must_divide(overrides: tuple[str, ...], counts: list[int]) -> None:
    assert possible_counts(config_of(*overrides)) == counts


def test_what_cannot_be_divided_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rollout.num_engines is 2 on 4 hosts, of which 3 cannot have a whole share"):
        on_hosts(config_of("rollout.num_engines=2"), 3)


def test_divided_devices_are_divided_in_the_same_way(tmp_path: Path) -> None:
    judge = (*runs.judge(tmp_path), "placement.mode=partial_colocation", "placement.dynamic=false")
    config = config_of(*judge, "placement.rollout_devices=4", "placement.min_genrm_devices=4")
    fewer = on_hosts(config, 2)
    assert (fewer.placement.rollout_devices, fewer.placement.min_genrm_devices) == (2, 2)
    assert len(fewer.make_placement().units) == 3 * 4
    assert possible_counts(config) == [4, 3, 2, 1]
