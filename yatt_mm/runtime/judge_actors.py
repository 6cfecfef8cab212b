"""How the actors of the judges are made: their engines, or those that send to their servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from yatt_mm.config.judge_section import SHARE_OF_CALL, JudgeSection, judge_spec, num_labels, remote_spec
from yatt_mm.config.run_config import Config
from yatt_mm.genrm.actor import JudgeActor
from yatt_mm.genrm.remote_actor import RemoteJudgeActor
from yatt_mm.hosts.run_node import RunNode
from yatt_mm.protocol.placement_model import Unit
from yatt_mm.protocol.rollout import EngineSpec
from yatt_mm.runtime.actors import create
from yatt_mm.runtime.judge_keys import key_file
from yatt_mm.runtime.makers import Maker, absolute
from yatt_mm.runtime.site import Site, log_file


def judge_makers(site: Site, rendezvous: Any, keys: Path) -> dict[str, list[Maker]]:
    """Return what makes the actors of each judge, by its name. `rendezvous`: its actor, which is told that a server
    is away. `keys`: the folder with the files of the servers' keys."""
    pools = site.placement.pools()
    return {
        name: _makers_of(site, name, section, pools[name], rendezvous, keys)
        for name, section in site.config.reward.judges.items()
    }


def _makers_of(
    site: Site, name: str, section: JudgeSection, units: Sequence[Unit], rendezvous: Any, keys: Path
) -> list[Maker]:
    """Return what makes the engines of a judge, or the actors that send to its server. Its folder is read once for all
    of them."""
    config = site.config
    server = remote_spec(
        name,
        section,
        controllers_deadline_s=config.controllers.deadline_s,
        api_key_file=key_file(keys, name, section),
    )
    shared: dict[str, Any] = {
        "spec": judge_spec(name, section, config.data.video.sampling()),
        "num_controllers": config.controllers.num,
        "deadline_s": config.controllers.deadline_s,
    }
    if server is not None:
        return [
            partial(
                create(
                    site.stack,
                    RemoteJudgeActor,
                    log=log_file(config, _judge_log(unit)),
                    concurrency=1000,
                    **site.hosts.own.placed(),  # where the keys are
                ),
                name=str(unit),
                server=server,
                rendezvous=rendezvous,
                dataplane_uri=site.node.uri,
                **shared,
            )
            for unit in units
        ]
    engine = judge_engine_spec(site.config, section, site.node)
    return [
        partial(
            site.create(JudgeActor, unit.devices, log=_judge_log(unit), concurrency=1000),
            name=str(unit),
            engine=replace(engine, cores=site.cores(unit.devices)),
            dataplane_uri=site.host(unit.devices).uri,
            **shared,
        )
        for unit in units
    ]


def _judge_log(unit: Unit) -> str:
    return f"judge-{unit.pool}-{unit.index}"


def judge_engine_spec(config: Config, section: JudgeSection, node: RunNode) -> EngineSpec:
    """Return what the settings of all engines of a judge have in common: all but their cores."""
    return EngineSpec(
        model_dir=absolute(section.model),
        dtype=config.model.dtype,
        max_model_len=section.max_model_len,
        max_num_seqs=section.max_num_seqs,
        kv_cache_bytes=section.kv_cache_memory,
        max_images_per_prompt=config.rollout.max_images_per_prompt,
        max_videos_per_prompt=config.rollout.max_videos_per_prompt,
        tp=section.tp,
        num_labels=num_labels(section),
        deadline_s=SHARE_OF_CALL * config.controllers.deadline_s / section.max_attempts,
        scope=node.scope,
        durable=node.durable,
    )
