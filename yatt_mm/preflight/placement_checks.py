"""Checks that the engines have the devices that they need, and that partial colocation can divide them."""

from __future__ import annotations

from collections.abc import Iterable

from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.placement_model import Engines


def check_placement(config: Config) -> None:
    """Check that every engine has its devices, and that a deterministic run uses nothing whose result depends on time.

    Raises:
        ConfigError: the placement cannot work.
    """
    if config.is_partial:
        _check_cells(config)
        _check_division(config)
    else:
        _check_undivided(config)
        _check_room("rollout.num_engines x rollout.tp", [config.engines], config)
        _check_room("reward.judges.*.num_engines x tp", config.judges.values(), config)
    sampling = config.sampling
    for key, value, neutral in (("over_dispatch", f"{sampling.over_dispatch:g}", "1"), ("tail", sampling.tail, "drop")):
        if value != neutral and config.rollout.deterministic:
            raise ConfigError(
                f"sampling.{key} is {value}, which goes by what is answered first, but rollout.deterministic is true; "
                f"set it to {neutral}, or rollout.deterministic=false"
            )


def _check_undivided(config: Config) -> None:
    section = config.placement
    for key in ("rollout_devices", "min_rollout_devices", "min_genrm_devices"):
        if getattr(section, key):
            raise ConfigError(
                f"placement.{key} is {getattr(section, key)}, but in placement.mode=full_colocation every role has all "
                "devices in turn; leave it out, or take placement.mode=partial_colocation"
            )


def _check_room(keys: str, pools: Iterable[Engines], config: Config) -> None:
    wanted, have = sum(engines.num_devices for engines in pools), config.placement.num_devices
    if wanted > have:
        raise ConfigError(
            f"{keys} is {wanted} devices, but placement.num_devices is {have}; an engine needs devices of its own, so "
            "lower the first or raise the second"
        )


def _check_cells(config: Config) -> None:
    """Check that devices move from one role to the other as whole engines of both."""
    section = config.placement
    sizes = {"rollout.tp": config.rollout.tp} | {
        f"reward.judges.{name}.tp": engines.tp for name, engines in config.judges.items() if engines.tp
    }
    largest = max(sizes, key=lambda key: sizes[key])
    size = sizes[largest]
    for key, tp in sizes.items():
        if size % tp:
            raise ConfigError(
                f"{key} is {tp} and {largest} {size}: in partial colocation devices pass from one role to the other as "
                f"whole engines of both, so make one a multiple of the other, or take placement.mode=full_colocation"
            )
    counts = {
        "placement.num_devices": section.num_devices,
        "placement.rollout_devices": section.rollout_devices or 0,
        "placement.min_rollout_devices": section.min_rollout_devices,
        "placement.min_genrm_devices": section.min_genrm_devices,
    }
    for key, count in counts.items():
        if count % size:
            raise ConfigError(f"{key} is {count} and {largest} {size}; the first must be a multiple of the second")


def _check_division(config: Config) -> None:
    section, num = config.placement, config.placement.num_devices
    if not config.reward.judges:
        raise ConfigError(
            "placement.mode is partial_colocation, which divides devices between rollout and judges, but reward.judges "
            "is empty; add a judge, or take placement.mode=full_colocation"
        )
    first, least = section.rollout_devices, section.min_rollout_devices + section.min_genrm_devices
    if not config.has_local_judges:
        given = {"rollout_devices": first not in (None, num), "min_genrm_devices": section.min_genrm_devices > 0}
        for key in (key for key, is_given in given.items() if is_given):
            raise ConfigError(
                f"placement.{key} is {getattr(section, key)}, but all judges are servers elsewhere (reward.judges.*."
                f"url), so all {num} devices answer; leave placement.{key} out"
            )
        return
    if config.rollout.deterministic and section.dynamic:
        raise ConfigError(
            "rollout.deterministic is true, but placement.dynamic moves devices by the clock; set "
            "placement.dynamic=false"
        )
    if (first or 0) > num or least > num:
        raise ConfigError(
            f"placement.rollout_devices is {first}, placement.min_rollout_devices + placement.min_genrm_devices "
            f"{least}, but placement.num_devices is {num}; lower them"
        )
    for key in ("min_rollout_devices", "min_genrm_devices"):
        if getattr(section, key) >= num:
            raise ConfigError(
                f"placement.{key} is {getattr(section, key)} of {num} devices (placement.num_devices), which leaves "
                "the other role none for ever; lower it"
            )
    division = config.division()
    assert division is not None
    if not division.bounds.allows(division.first):
        raise ConfigError(
            f"placement.rollout_devices is {first} of {num} devices, but placement.min_rollout_devices is "
            f"{section.min_rollout_devices} and placement.min_genrm_devices {section.min_genrm_devices}; change one"
        )
    if not section.dynamic and not (division.first.rollout and division.first.genrm):
        raise ConfigError(
            f"with placement.dynamic=false the {division.first.num_cells} cell(s) of placement.num_devices ({num}) are "
            f"divided {division.first}: rollout and judges need at least one each; change placement.rollout_devices, "
            "add devices, or let them move (placement.dynamic=true)"
        )
